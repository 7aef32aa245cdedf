"""Metrics, progress, spans: what people see of a run."""
