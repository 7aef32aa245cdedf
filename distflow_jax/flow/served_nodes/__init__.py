"""Nodes of the host that workers run on groups whose samples are complete."""
