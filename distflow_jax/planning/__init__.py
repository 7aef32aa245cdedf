"""Plans of a run, made before any array exists: sizes, meshes, models, programs, memory."""
