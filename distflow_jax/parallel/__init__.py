"""Meshes, sharding rules, processes, transfers."""
