"""Prefill: prompts into the KV cache, shared prefixes included."""
