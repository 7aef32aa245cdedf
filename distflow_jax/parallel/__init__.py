"""Meshes, sharding rules, processes, pipeline and context parallelism, host exchange."""
