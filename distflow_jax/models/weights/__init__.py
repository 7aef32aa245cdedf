"""Weights in: sources, file formats, and the check that names and shapes fit."""
