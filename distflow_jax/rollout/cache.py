"""The sampler's key/value cache: blocks of tokens, slot by slot.

C blocks, B slots, K key/value heads, H head dim, W tokens per block.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.models.config import DecoderConfig

KEY_AXES = ("layers", "blocks", "batch", "kv_heads", "head_dim", "length")
VALUE_AXES = ("layers", "blocks", "batch", "kv_heads", "length", "head_dim")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Cache:
    """Keys [layers, C, B, K, H, W] and values [layers, C, B, K, W, H].

    Block-major, so that attention over the used part reads whole contiguous blocks.
    """

    key: Any
    value: Any


def cache_shapes(
    config: DecoderConfig, *, slots: int, tokens: int, block: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of keys and values for `tokens` per slot, rounded up to whole blocks."""
    blocks = -(-tokens // block)
    head = (config.num_layers, blocks, slots, config.num_kv_heads)
    return (*head, config.head_dim, block), (*head, block, config.head_dim)


def append(cache: Cache, key: jax.Array, value: jax.Array, position_B: jax.Array) -> Cache:
    """Writes one token per slot. key, value [layers, B, K, H]; position_B where it goes.

    A position beyond the cache is dropped: slots that are not active pass one.
    """
    block = cache.key.shape[-1]
    which, within = position_B // block, position_B % block
    slots = jnp.arange(position_B.shape[0], dtype=jnp.int32)
    return Cache(
        # advanced indices around slices put the slot dim first: [B, layers, K, H]
        cache.key.at[:, which, slots, :, :, within].set(key.swapaxes(0, 1), mode="drop"),
        cache.value.at[:, which, slots, :, within].set(value.swapaxes(0, 1), mode="drop"),
    )


def insert(cache: Cache, key: jax.Array, value: jax.Array, slots: jax.Array) -> Cache:
    """Copies one prompt's keys and values [layers, T, K, H] into `slots` [n]; T whole blocks.

    Slots out of range are dropped, so that `n` can be static while fewer are filled.
    """
    block = cache.key.shape[-1]
    layers, length, kv_heads, head_dim = key.shape
    parts = length // block
    shape = (layers, parts, block, kv_heads, head_dim)
    k = key.reshape(shape).transpose(0, 1, 3, 4, 2)[:, :, None]
    v = value.reshape(shape).transpose(0, 1, 3, 2, 4)[:, :, None]
    wide = (layers, parts, slots.shape[0])
    return Cache(
        cache.key.at[:, :parts, slots].set(jnp.broadcast_to(k, (*wide, *k.shape[3:])), mode="drop"),
        cache.value.at[:, :parts, slots].set(
            jnp.broadcast_to(v, (*wide, *v.shape[3:])), mode="drop"
        ),
    )
