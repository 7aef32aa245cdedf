"""Training objectives, one module per kind of model or data."""
