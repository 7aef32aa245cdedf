"""Measurements of a run: metrics, spans, profiles, memory, compilations."""
