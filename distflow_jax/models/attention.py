"""Attention over packed rows and over a block-wise key/value cache.

B batch or slots, T query tokens, S key tokens, N heads, K key/value heads, G = N / K heads per
key/value head, H head dim, C cache blocks, W tokens per cache block.
"""

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a fully masked row gives a uniform softmax instead of nan


def packed_mask(segment_BT: jax.Array, parent_BT: jax.Array) -> jax.Array:
    """Which token sees which, bool [B, T, T].

    A token sees earlier tokens of its own segment and of its parent segment (the prompt that
    several responses share; equal to the own segment where the prompt is not shared). 0 is padding.
    """
    length = segment_BT.shape[1]
    query, key = segment_BT[:, :, None], segment_BT[:, None, :]
    related = (query == key) | (parent_BT[:, :, None] == key)
    causal = jnp.tril(jnp.ones((length, length), bool))[None]
    return related & causal & (query > 0)


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
    return out.transpose(0, 3, 1, 2, 4).reshape(q_BTNH.shape)


def cached_attention(
    q_BNH: jax.Array,
    new_k_BKH: jax.Array,
    new_v_BKH: jax.Array,
    cache_k: jax.Array,
    cache_v: jax.Array,
    layer: jax.Array,
    length_B: jax.Array,
    used_blocks: jax.Array,
) -> jax.Array:
    """One query token per slot against its cached tokens and itself. Returns [B, N, H].

    `cache_k` [layers, C, B, K, H, W] and `cache_v` [layers, C, B, K, W, H] are read block by block,
    only the first `used_blocks` (traced) of them, and merged by running log-sum-exp. Keys are
    stored head dim first: on CPU the score product then runs twice as fast.
    """
    _, _, slots, kv_heads, head_dim, width = cache_k.shape
    q = q_BNH.reshape(slots, kv_heads, -1, head_dim)
    scale = head_dim**-0.5
    own = jnp.einsum("BKGH,BKH->BKG", q, new_k_BKH).astype(jnp.float32) * scale

    def block(index, carry):
        top, total, out = carry
        start = (layer, index, 0, 0, 0, 0)
        k = jax.lax.dynamic_slice(cache_k, start, (1, 1, *cache_k.shape[2:]))[0, 0]
        v = jax.lax.dynamic_slice(cache_v, start, (1, 1, *cache_v.shape[2:]))[0, 0]
        logits = jnp.einsum("BKGH,BKHW->BKGW", q, k).astype(jnp.float32) * scale
        position = index * width + jnp.arange(width, dtype=jnp.int32)
        valid = position[None, :] < length_B[:, None]
        logits = jnp.where(valid[:, None, None], logits, _MASKED)
        new_top = jnp.maximum(top, logits.max(-1))
        shrink = jnp.exp(top - new_top)
        # where: a slot with nothing in this block would otherwise count exp(0) for every position
        weight = jnp.where(valid[:, None, None], jnp.exp(logits - new_top[..., None]), 0.0)
        part = jnp.einsum("BKGW,BKWH->BKGH", weight.astype(v.dtype), v).astype(jnp.float32)
        return new_top, total * shrink + weight.sum(-1), out * shrink[..., None] + part

    own_value = jnp.broadcast_to(new_v_BKH[:, :, None, :].astype(jnp.float32), q.shape)
    top, total, out = jax.lax.fori_loop(0, used_blocks, block, (own, jnp.ones_like(own), own_value))
    return (out / total[..., None]).astype(q_BNH.dtype).reshape(q_BNH.shape)
