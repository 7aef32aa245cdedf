"""Advantages, losses, KL: pure functions."""
