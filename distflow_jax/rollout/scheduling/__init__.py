"""Continuous batching: which sequence runs in which slot."""
