"""Masked attention over packed rows, or over the shards of rows that devices share.

B batch, T query tokens, S key tokens, N heads, K key/value heads, H head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.remat import ATTENTION, named

UNLIMITED = 2**30  # window of a layer without one: above every distance, without overflow in sums
_MASKED = -1e30  # finite: a fully masked row gives a uniform softmax instead of nan


class InRow(NamedTuple):
    """Indices in the row of the T query tokens of a row's shard and of the row's S key tokens.

    A query attends to keys up to its index, which may lie behind its token. Key tokens are in the
    order of their keys.
    """

    place_BT: jax.Array  # int32
    segment_BS: jax.Array  # int32
    place_BS: jax.Array  # int32


def whole_rows(segment_BT: jax.Array) -> InRow:
    """The InRow of whole rows: queries and keys are all tokens in order."""
    place = jax.lax.broadcasted_iota(jnp.int32, segment_BT.shape, 1)
    return InRow(place, segment_BT, place)


def packed_mask(
    segment_BT: jax.Array, parent_BT: jax.Array, in_row: InRow | None = None
) -> jax.Array:
    """Attention mask of packed rows, bool [B, T, S]: True where a query attends to a key.

    A token attends to itself and to earlier tokens of its own segment and of its parent segment
    (the shared prompt; equal to the own segment if the prompt is not shared). 0 is padding.
    `in_row` is needed if the T tokens are a shard of a row; without it S = T.
    """
    at, segment_BS, key_at = in_row or whole_rows(segment_BT)
    query, key = segment_BT[:, :, None], segment_BS[:, None, :]
    related = (query == key) | (parent_BT[:, :, None] == key)
    causal = at[:, :, None] >= key_at[:, None, :]
    return related & causal & (query > 0)


def within(position_BT: jax.Array, key_position_BS: jax.Array, window: jax.Array) -> jax.Array:
    """Sliding-window mask, bool [B, T, S]: True for keys less than `window` before the query.

    Positions int32 count within the sequence, its shared prompt included, not within the row. Keys
    after the query are left to the causal mask. `window` int32; UNLIMITED allows all.
    """
    return position_BT[:, :, None] - key_position_BS[:, None, :] < window


def masked_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
    sinks_N: jax.Array | None = None,
    soft_cap: float = 0.0,
) -> jax.Array:
    """softmax(q k / sqrt(H)) v with grouped heads; softmax in float32. Returns [B, T, N, H].

    `sinks_N`: logits that take part in the softmax and have no value, one per query head (Xiao et
    al. 2023, arxiv.org/abs/2309.17453). `soft_cap` c: scores are c tanh(score / c) (Gemma 2,
    arxiv.org/abs/2408.00118, sec. 2); 0: off.
    """
    batch, length, heads, head_dim = q_BTNH.shape
    kv_heads = k_BSKH.shape[2]
    groups = heads // kv_heads
    # query heads of a key/value head are put side by side: one product per key/value head is a
    # quarter faster on CPU than one per query head
    q = q_BTNH.reshape(batch, length, kv_heads, groups, head_dim)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, groups * length, head_dim)
    k, v = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    logits = jnp.einsum("BKQH,BKSH->BKQS", q, k).astype(jnp.float32) * head_dim**-0.5
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = logits.reshape(batch, kv_heads, groups, length, -1)
    logits = jnp.where(mask_BTS[:, None, None], logits, _MASKED)
    if sinks_N is None:
        weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    else:
        sinks = sinks_N.astype(jnp.float32).reshape(1, kv_heads, groups, 1, 1)
        logits = jnp.concatenate([logits, sinks + jnp.zeros_like(logits[..., :1])], axis=-1)
        weights = jax.nn.softmax(logits, axis=-1)[..., :-1].astype(v.dtype)
    weights = weights.reshape(batch, kv_heads, groups * length, -1)
    out = jnp.einsum("BKQS,BKSH->BKQH", weights, v)
    out = out.reshape(batch, kv_heads, groups, length, head_dim)
    return named(ATTENTION, out.transpose(0, 3, 1, 2, 4).reshape(q_BTNH.shape))


def causal_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, window: jax.Array | None = None
) -> jax.Array:
    """Causal attention over whole sequences, one per row, [B, T, N, H].

    `window`, an int32 scalar, limits a token to the last `window` tokens up to itself.
    """
    batch, length = q_BTNH.shape[:2]
    place = jax.lax.broadcasted_iota(jnp.int32, (batch, length), 1)
    mask = within(place, place, UNLIMITED if window is None else window)
    return masked_attention(q_BTNH, k_BTKH, v_BTKH, mask & (place[:, :, None] >= place[:, None]))
