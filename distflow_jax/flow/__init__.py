"""Asynchronous steps: groups are sampled ahead of the training, within a bound."""
