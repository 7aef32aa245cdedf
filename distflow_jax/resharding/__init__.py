"""Arrays on their way between meshes: rows between stages, weights to the sampler."""
