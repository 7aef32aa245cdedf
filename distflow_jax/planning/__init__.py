"""Everything known before an array exists: sizes, meshes, models, programs, memory."""
