"""Meshes, sharding rules, pipeline and context parallelism, memory of devices."""
