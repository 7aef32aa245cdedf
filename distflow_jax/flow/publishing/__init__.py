"""Which versions of the weights are published, and when a sampler takes one between two tokens."""
