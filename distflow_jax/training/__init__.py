"""Training: forward passes over packed rows, objectives, gradient accumulation, optimizer."""
