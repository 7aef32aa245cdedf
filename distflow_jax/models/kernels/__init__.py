"""Kernels for accelerators, each beside the plain jax.numpy form that states what it computes."""
