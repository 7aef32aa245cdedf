"""Sampling: JetStream's engine over our network, and the scheduler that drives it."""
