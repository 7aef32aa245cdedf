"""Samples that run ahead of the training: schedule, task buffer, workers, sources."""
