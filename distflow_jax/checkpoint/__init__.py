"""Checkpoints, and the export of trained weights."""
