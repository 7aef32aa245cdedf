"""Moves of arrays between meshes: rows between training meshes, weights to the samplers."""
