"""Tiled attention over packed rows in plain jax.numpy: CPU backend, and reference of the kernels.

B rows or shards of rows, C tokens of a block, n blocks of queries and m of keys, K key/value heads,
G query heads of each, X = G C query rows of a block, H head dim. Algorithms 1 and 2 of
FlashAttention-2: Dao 2023, arxiv.org/abs/2307.08691.
"""

import functools

import jax
import jax.numpy as jnp

from distflow_jax.models.kernels.tiles import Reach, Tiles
from distflow_jax.programs.bounded_loops import bounded_loop

_MASKED = -1e30  # finite: the difference of two is 0, not NaN


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles, reach: Reach | None
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, n, K, X, H] over k and v [B, m, K, C, H].

    Returns the result, like q, and the log-sum-exps of the scores, float32 [B, n, K, X]. Both are 0
    for queries without keys. Positions of `reach` are [B, n, C] and [B, m, C].
    """
    blocks, size = tiles.key_segment.shape[1:]

    def of_queries(row, query, carry):
        q_block = _at(q, row, query)
        keys = _at(tiles.keys, row, query)

        def tile(index, carry):
            out, top, total = carry
            key = keys[index]
            scores, allowed = _scores(q_block, _at(k, row, key), tiles, reach, row, query, key)
            scores = jnp.where(allowed, scores, _MASKED)
            new = jnp.maximum(top, scores.max(-1))
            weight = jnp.where(allowed, jnp.exp(scores - new[..., None]), 0.0)
            shrink = jnp.exp(top - new)
            total = total * shrink + weight.sum(-1)
            weight = weight.reshape(*q_block.shape[:2], size).astype(v.dtype)
            add = jnp.einsum(
                "KXS,KSH->KXH", weight, _at(v, row, key), preferred_element_type=jnp.float32
            )
            return out * shrink.reshape(*q_block.shape[:2], 1) + add, new, total

        split = (q_block.shape[0], q_block.shape[1] // size, size)
        empty = jnp.full(split, _MASKED, jnp.float32)
        init = jnp.zeros(q_block.shape, jnp.float32), empty, jnp.zeros(split, jnp.float32)
        number = tiles.num_keys[row, query]
        out, top, total = bounded_loop(number, tile, init, most=blocks)
        nothing = total == 0.0  # padding
        total = jnp.where(nothing, 1.0, total)
        lse = jnp.where(nothing, 0.0, top + jnp.log(total)).reshape(q_block.shape[:2])
        outs, lses = carry
        out = out / total.reshape(*q_block.shape[:2], 1)
        return _write(outs, out, row, query), _write(lses, lse, row, query)

    start = jnp.zeros_like(q), jnp.zeros(q.shape[:-1], jnp.float32)
    return _over_blocks(tiles.num_keys, of_queries, start)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: Tiles,
    reach: Reach | None,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q [B, n, K, X, H], k and v [B, m, K, C, H], like these.

    `lse` is forward's. `delta` float32 [B, n, K, X] is the paper's D, the sum of out * d_out over
    H.
    """
    blocks, size = tiles.segment.shape[1:]
    scale = q.shape[-1] ** -0.5

    def of_keys(row, key, carry):
        k_block, v_block = _at(k, row, key), _at(v, row, key)
        queries = _at(tiles.queries, row, key)

        def tile(index, carry):
            d_q, d_k, d_v = carry
            query = queries[index]
            q_block, d_block = _at(q, row, query), _at(d_out, row, query)
            scores, allowed = _scores(q_block, k_block, tiles, reach, row, query, key)
            by_head = scores.shape[:3]
            of_lse = _at(lse, row, query).reshape(by_head)[..., None]
            weight = jnp.where(allowed, jnp.exp(scores - of_lse), 0.0)
            d_weight = jnp.einsum(
                "KXH,KSH->KXS", d_block, v_block, preferred_element_type=jnp.float32
            ).reshape(scores.shape)
            of_delta = _at(delta, row, query).reshape(by_head)[..., None]
            d_scores = weight * (d_weight - of_delta) * scale
            weight, d_scores = (
                x.reshape(*q_block.shape[:2], size).astype(q.dtype) for x in (weight, d_scores)
            )
            product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            d_k += product("KXS,KXH->KSH", d_scores, q_block)
            d_v += product("KXS,KXH->KSH", weight, d_block)
            add = product("KXS,KSH->KXH", d_scores, k_block)
            return _write(d_q, _at(d_q, row, query) + add, row, query), d_k, d_v

        d_q, d_ks, d_vs = carry
        init = d_q, *(jnp.zeros(k_block.shape, jnp.float32) for _ in range(2))
        number = tiles.num_queries[row, key]
        d_q, d_k, d_v = bounded_loop(number, tile, init, most=blocks)
        return d_q, _write(d_ks, d_k, row, key), _write(d_vs, d_v, row, key)

    start = jnp.zeros(q.shape, jnp.float32), jnp.zeros_like(k), jnp.zeros_like(v)
    d_q, d_k, d_v = _over_blocks(tiles.num_queries, of_keys, start)
    return d_q.astype(q.dtype), d_k, d_v


def _at(x: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    """The block x[row, block] of x [B, n, ...]."""
    start = (row, block, *[0] * (x.ndim - 2))
    return jax.lax.dynamic_slice(x, start, (1, 1, *x.shape[2:]))[0, 0]


def _write(x: jax.Array, value: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    start = (row, block, *[0] * (x.ndim - 2))
    return jax.lax.dynamic_update_slice(x, value[None, None].astype(x.dtype), start)


def _scores(q, k, tiles, reach, row, query, key):
    """Scaled scores float32 [K, G, C, C] of a tile, and the mask of allowed pairs [1, 1, C, C]."""
    kv_heads, _, head_dim = q.shape
    size = k.shape[1]
    scores = jnp.einsum("KXH,KSH->KXS", q, k, preferred_element_type=jnp.float32)
    segment, parent = _at(tiles.segment, row, query), _at(tiles.parent, row, query)
    key_segment = _at(tiles.key_segment, row, key)[None]
    place = jnp.arange(size, dtype=jnp.int32)
    at, key_at = _at(tiles.place, row, query), _at(tiles.key_place, row, key)
    causal = at[:, None] >= (key_at + place)[None]
    related = (segment[:, None] == key_segment) | (parent[:, None] == key_segment)
    allowed = related & causal
    allowed &= (segment > 0)[:, None]
    if reach is not None:
        here, there = _at(reach.position_BT, row, query), _at(reach.key_position_BS, row, key)
        allowed &= here[:, None] - there[None] < reach.window
    scores = (scores * head_dim**-0.5).reshape(kv_heads, -1, size, size)
    return scores, allowed[None, None]


def _over_blocks(number: jax.Array, body, init):
    """Runs `body(row, block, carry)` for every block of every row; `number` is [B, blocks]."""
    rows, blocks = number.shape

    def step(index, carry):
        return body(index // blocks, index % blocks, carry)

    return jax.lax.fori_loop(0, rows * blocks, step, init)
