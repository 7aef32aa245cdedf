"""Attention over packed rows, whole or in parts, and over a block-wise key/value cache.

B batch or slots, T query tokens, S key tokens, N heads, K key/value heads, G = N / K heads per
key/value head, H head dim, C cache blocks, W tokens per cache block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.remat import ATTENTION, named

UNLIMITED = 2**30  # window of a layer that sees all: above every distance, and no overflow in sums
_MASKED = -1e30  # finite: a fully masked row gives a uniform softmax instead of nan


class InRow(NamedTuple):
    """Where the T tokens of a part of a row lie in it, and the S tokens of the whole row, in the
    order in which their keys come."""

    place_BT: jax.Array  # int32
    segment_BS: jax.Array  # int32
    place_BS: jax.Array  # int32


def whole_rows(segment_BT: jax.Array) -> InRow:
    """That of rows which are all there, token after token."""
    place = jax.lax.broadcasted_iota(jnp.int32, segment_BT.shape, 1)
    return InRow(place, segment_BT, place)


def packed_mask(
    segment_BT: jax.Array, parent_BT: jax.Array, in_row: InRow | None = None
) -> jax.Array:
    """Which token sees which, bool [B, T, S].

    A token sees earlier tokens of its own segment and of its parent segment (the prompt that
    several responses share; equal to the own segment where the prompt is not shared). 0 is padding.
    Where the tokens are a part of their rows, `in_row` tells of the rest; S is T without.
    """
    at, segment_BS, key_at = in_row or whole_rows(segment_BT)
    query, key = segment_BT[:, :, None], segment_BS[:, None, :]
    related = (query == key) | (parent_BT[:, :, None] == key)
    causal = at[:, :, None] >= key_at[:, None, :]
    return related & causal & (query > 0)


def within(position_BT: jax.Array, key_position_BS: jax.Array, window: jax.Array) -> jax.Array:
    """Whether a key is one of the last `window` tokens up to the query's, bool [B, T, S].

    Positions int32 are those in the sequence, a shared prompt included, not places in a row; what
    comes after the query is left to the causal mask. `window` int32, UNLIMITED for all.
    """
    return position_BT[:, :, None] - key_position_BS[:, None, :] < window


def masked_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """softmax(q k / sqrt(H)) v with grouped heads; softmax in float32. Returns [B, T, N, H]."""
    batch, length, heads, head_dim = q_BTNH.shape
    kv_heads = k_BSKH.shape[2]
    groups = heads // kv_heads
    # query heads of one key/value head side by side: one product per key/value head, a quarter
    # faster on CPU than one per query head
    q = q_BTNH.reshape(batch, length, kv_heads, groups, head_dim)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, groups * length, head_dim)
    k, v = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    logits = jnp.einsum("BKQH,BKSH->BKQS", q, k).astype(jnp.float32) * head_dim**-0.5
    logits = logits.reshape(batch, kv_heads, groups, length, -1)
    logits = jnp.where(mask_BTS[:, None, None], logits, _MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    weights = weights.reshape(batch, kv_heads, groups * length, -1)
    out = jnp.einsum("BKQS,BKSH->BKQH", weights, v)
    out = out.reshape(batch, kv_heads, groups, length, head_dim)
    return named(ATTENTION, out.transpose(0, 3, 1, 2, 4).reshape(q_BTNH.shape))


def causal_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, window: jax.Array | None = None
) -> jax.Array:
    """masked_attention of whole sequences, one per row: a token sees those up to itself, or the
    last `window` of them, int32."""
    batch, length = q_BTNH.shape[:2]
    place = jax.lax.broadcasted_iota(jnp.int32, (batch, length), 1)
    mask = within(place, place, UNLIMITED if window is None else window)
    return masked_attention(q_BTNH, k_BTKH, v_BTKH, mask & (place[:, :, None] >= place[:, None]))
