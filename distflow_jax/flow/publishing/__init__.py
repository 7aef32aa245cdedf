"""Which versions of the weights are published, and how they reach the samplers."""
