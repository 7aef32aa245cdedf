"""Decoder networks: layers, kernels, model families, tokenizers and weight files."""
