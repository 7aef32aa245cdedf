"""Memory that prompts take on a sampler's devices, beside the cache of its slots."""

import jax.numpy as jnp

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.moe import recorded_dtype
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.prefill.prefill import chunk_room, shared_room, takes_chunks
from distflow_jax.rollout.prefill.prefix_cache import cache_budget


def reading_bytes(model: DecoderConfig, config: EngineConfig, tensor: int) -> int:
    """Bytes on one of `tensor` devices of long prompts that are being read, beside the cache; 0
    where rows are long enough for every prompt.

    A prompt that is read in chunks has room for the longest. Two exist at a time: one that slots
    have still to take, or that is resumed, and the one that is read.
    """
    if not takes_chunks(config):
        return 0
    return 2 * chunk_room(config) * _prompt_token_bytes(model, config, tensor)


def shared_bytes(model: DecoderConfig, config: EngineConfig, tensor: int) -> int:
    """Bytes on one of `tensor` devices of shared prefixes: all that are cached, and one that is
    copied into room for the longest."""
    if not config.prefix_tokens:
        return 0
    tokens = cache_budget(config) + shared_room(config)
    return tokens * _prompt_token_bytes(model, config, tensor)


def _prompt_token_bytes(model: DecoderConfig, config: EngineConfig, tensor: int) -> int:
    """Bytes of a token outside of the cache, on one of `tensor` devices."""
    heads = model.num_kv_heads
    heads = heads // tensor if heads % tensor == 0 else heads
    experts = 0
    if config.record_experts:
        experts = model.experts_per_token * recorded_dtype(model.num_experts).itemsize
    keys = heads * model.head_dim * jnp.dtype(config.dtype).itemsize
    return model.num_layers * (2 * keys + experts)
