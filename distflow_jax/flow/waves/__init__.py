"""Waves: a step's groups go through its nodes on devices as they become complete."""
