"""Sampling: JetStream's engine over our network, and who decodes when."""
