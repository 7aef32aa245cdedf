"""Attention kernels for TPUs and GPUs, each with a jax.numpy reference implementation."""
