"""Reinforcement-learning post-training of language models in JAX, without a central node."""
