"""Helpers that tests share: tiny models, formulas, workers of other processes."""
