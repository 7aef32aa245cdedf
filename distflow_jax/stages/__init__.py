"""Stages: the functions of nodes, and the contexts that they are built from."""
