"""Attention over packed rows, tile by tile, and only over tiles that hold a pair that counts.

B rows or parts of rows, T tokens of one, S tokens of a whole row, C tokens of a block, n = T / C
and m = S / C blocks, N heads, K key/value heads, G = N / K heads per key/value head, X = G C query
rows of a block, H head dim.

A row that holds many short sequences, or a causal one, needs less than half of its [T, T] scores.
Where a layer sees a window only, tiles outside of it are left out too. Scores of one tile exist at
a time; the backward pass computes them again from the log-sum-exps
(FlashAttention-2: Dao 2023, arxiv.org/abs/2307.08691, algorithms 1 and 2).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.attention import InRow, whole_rows
from distflow_jax.models.remat import ATTENTION, named
from distflow_jax.programs.loops import bounded_loop

_MASKED = -1e30  # finite: the difference of two is 0, not NaN


class Tiles(NamedTuple):
    """Which blocks of keys each block of queries reads, and the other way round."""

    segment: jax.Array  # int32 [B, n, C]
    parent: jax.Array  # int32 [B, n, C]
    place: jax.Array  # int32 [B, n]: of each block's first token in the row
    key_segment: jax.Array  # int32 [B, m, C]
    key_place: jax.Array  # int32 [B, m]
    keys: jax.Array  # int32 [B, n, m]: of each block of queries, those it reads first
    num_keys: jax.Array  # int32 [B, n]
    queries: jax.Array  # int32 [B, m, n]: of each block of keys, those that read it first
    num_queries: jax.Array  # int32 [B, m]


class Reach(NamedTuple):
    """How far back tokens see: as attention.within has it."""

    position_BT: jax.Array  # int32: of the tokens in their sequences
    key_position_BS: jax.Array  # int32: of those of the whole row
    window: jax.Array | int  # int32


def tiles_of(
    segment_BT: jax.Array,
    parent_BT: jax.Array,
    block: int,
    in_row: InRow | None = None,
    reach: Reach | None = None,
) -> Tiles:
    """The tiles of rows, or of parts of them, as attention.packed_mask relates their tokens; with
    `reach` those of them that hold a pair within its window.

    The tokens of a block must follow each other in the row. Raises ValueError where `block` does
    not divide T.
    """
    rows, length = segment_BT.shape
    if length % block:
        fits = [n for n in range(1, length + 1) if length % n == 0]
        near = min(fits, key=lambda n: abs(n - block))
        raise ValueError(f"blocks of {block} tokens do not divide rows of {length}; use {near}")
    in_row = in_row or whole_rows(segment_BT)
    segment, parent, of_row = (
        x.reshape(rows, -1, block) for x in (segment_BT, parent_BT, in_row.segment_BS)
    )
    place, key_place = (x[:, ::block] for x in (in_row.place_BT, in_row.place_BS))

    of_query = [segment, parent]
    if reach is not None:
        of_query.append(reach.position_BT.reshape(segment.shape))
        key_position = reach.key_position_BS.reshape(of_row.shape)

    # a block of queries at a time: XLA:CPU keeps what it compares before it reduces it, [T, S]
    def of_queries(query):
        own, shared, *position = (x[:, :, None, None] for x in query)
        key = of_row[:, None]
        counts = ((own == key) | (shared == key)) & (own > 0)
        if reach is not None:
            counts &= position[0] - key_position[:, None] < reach.window
        return jnp.any(counts, axis=(1, 3))

    related = jax.lax.map(of_queries, tuple(x.swapaxes(0, 1) for x in of_query))
    related = related.swapaxes(0, 1)
    related &= place[:, :, None] >= key_place[:, None, :]

    def listed(related):  # those that hold first, in their order
        order = jnp.argsort(~related, axis=2, stable=True).astype(jnp.int32)
        return order, related.sum(2, dtype=jnp.int32)

    keys, queries = listed(related), listed(related.swapaxes(1, 2))
    return Tiles(segment, parent, place, of_row, key_place, *keys, *queries)


def either(condition: jax.Array, near: Tiles, every: Tiles) -> Tiles:
    """The lists of `near` where the bool `condition` holds, else those of `every`, of one row."""
    lists = ("keys", "num_keys", "queries", "num_queries")
    return every._replace(
        **{name: jnp.where(condition, getattr(near, name), getattr(every, name)) for name in lists}
    )


def block_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    tiles: Tiles,
    across: tuple[str, ...] = (),
    reach: Reach | None = None,
) -> jax.Array:
    """softmax(q k / sqrt(H)) v over the pairs that packed_mask allows, [B, T, N, H] like q; with
    `reach` over those of them that lie within its window, all of which `tiles` must hold.

    Scores and sums are float32. Tokens of segment 0 come out as 0. Rows, or parts of them, and
    heads must be whole on a device (see parallel.rules.local): which tiles are read differs from
    row to row. `across` are the mesh axes over which the parts of a row are divided: keys and
    values are gathered over them, and again in the backward pass rather than kept.
    """
    rows, length, heads, head_dim = q_BTNH.shape
    kv_heads, size = k_BTKH.shape[2], tiles.segment.shape[2]
    blocks = length // size
    # query heads of one key/value head side by side: one product for all of them
    q = q_BTNH.reshape(rows, blocks, size, kv_heads, heads // kv_heads, head_dim)
    q = q.transpose(0, 1, 3, 4, 2, 5).reshape(rows, blocks, kv_heads, -1, head_dim)
    k, v = (
        x.reshape(rows, blocks, size, kv_heads, head_dim).swapaxes(2, 3) for x in (k_BTKH, v_BTKH)
    )
    if reach is not None:
        reach = reach._replace(
            position_BT=reach.position_BT.reshape(tiles.segment.shape),
            key_position_BS=reach.key_position_BS.reshape(tiles.key_segment.shape),
        )
    out = _attention(q, k, v, tiles, reach, across)
    out = out.reshape(rows, blocks, kv_heads, heads // kv_heads, size, head_dim)
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(q_BTNH.shape)


def _at(x: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    """x[row, block] of [B, n, ...]."""
    start = (row, block, *[0] * (x.ndim - 2))
    return jax.lax.dynamic_slice(x, start, (1, 1, *x.shape[2:]))[0, 0]


def _put(x: jax.Array, part: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    start = (row, block, *[0] * (x.ndim - 2))
    return jax.lax.dynamic_update_slice(x, part[None, None].astype(x.dtype), start)


def _scores(q, k, tiles, reach, row, query, key):
    """Scaled scores float32 [K, G, C, C] of one tile, and which of them count, [1, 1, C, C]."""
    kv_heads, _, head_dim = q.shape
    size = k.shape[1]
    scores = jnp.einsum("KXH,KSH->KXS", q, k, preferred_element_type=jnp.float32)
    segment, parent = _at(tiles.segment, row, query), _at(tiles.parent, row, query)
    seen = _at(tiles.key_segment, row, key)[None]
    place = jnp.arange(size, dtype=jnp.int32)
    at, key_at = _at(tiles.place, row, query), _at(tiles.key_place, row, key)
    causal = (at + place)[:, None] >= (key_at + place)[None]
    counts = ((segment[:, None] == seen) | (parent[:, None] == seen)) & causal
    counts &= (segment > 0)[:, None]
    if reach is not None:
        here, there = _at(reach.position_BT, row, query), _at(reach.key_position_BS, row, key)
        counts &= here[:, None] - there[None] < reach.window
    scores = (scores * head_dim**-0.5).reshape(kv_heads, -1, size, size)
    return scores, counts[None, None]


def _gathered(x: jax.Array, across: tuple[str, ...]) -> jax.Array:
    """[B, n, ...] -> [B, m, ...]: the blocks of all parts of a row, part after part."""
    return jax.lax.all_gather(x, across, axis=1, tiled=True) if across else x


def _summed(x: jax.Array, across: tuple[str, ...]) -> jax.Array:
    """[B, m, ...] -> [B, n, ...]: the transpose of _gathered."""
    return jax.lax.psum_scatter(x, across, scatter_dimension=1, tiled=True) if across else x


def _over_blocks(number: jax.Array, body, init):
    """`body(row, block, carry)` for every block of every row, of which `number` has an entry."""
    rows, blocks = number.shape

    def step(index, carry):
        return body(index // blocks, index % blocks, carry)

    return jax.lax.fori_loop(0, rows * blocks, step, init)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: Tiles,
    reach: Reach | None,
    across: tuple[str, ...],
) -> jax.Array:
    """q [B, n, K, X, H], k and v [B, n, K, C, H] -> like q. `reach`: positions [B, n, C] and
    [B, m, C]."""
    return _forward(q, k, v, tiles, reach, across)[0]


def _forward(q, k, v, tiles, reach, across):
    residuals = q, k, v, tiles, reach
    k, v = _gathered(k, across), _gathered(v, across)
    blocks, size = tiles.key_segment.shape[1:]

    def of_queries(row, query, carry):
        part = _at(q, row, query)
        keys = _at(tiles.keys, row, query)

        def tile(index, carry):
            out, top, total = carry
            key = keys[index]
            scores, counts = _scores(part, _at(k, row, key), tiles, reach, row, query, key)
            scores = jnp.where(counts, scores, _MASKED)
            new = jnp.maximum(top, scores.max(-1))
            weight = jnp.where(counts, jnp.exp(scores - new[..., None]), 0.0)
            shrink = jnp.exp(top - new)
            total = total * shrink + weight.sum(-1)
            weight = weight.reshape(*part.shape[:2], size).astype(v.dtype)
            add = jnp.einsum(
                "KXS,KSH->KXH", weight, _at(v, row, key), preferred_element_type=jnp.float32
            )
            return out * shrink.reshape(*part.shape[:2], 1) + add, new, total

        split = (part.shape[0], part.shape[1] // size, size)
        empty = jnp.full(split, _MASKED, jnp.float32)
        init = jnp.zeros(part.shape, jnp.float32), empty, jnp.zeros(split, jnp.float32)
        number = tiles.num_keys[row, query]
        out, top, total = bounded_loop(number, tile, init, most=blocks)
        nothing = total == 0.0  # padding
        total = jnp.where(nothing, 1.0, total)
        lse = jnp.where(nothing, 0.0, top + jnp.log(total)).reshape(part.shape[:2])
        outs, lses = carry
        out = out / total.reshape(*part.shape[:2], 1)
        return _put(outs, out, row, query), _put(lses, lse, row, query)

    start = jnp.zeros_like(q), jnp.zeros(q.shape[:-1], jnp.float32)
    # named here, where the backward pass takes them from: outside they have other shapes
    found = _over_blocks(tiles.num_keys, of_queries, start)
    out, lse = (named(ATTENTION, x) for x in found)
    return out, (*residuals, out, lse)


def _backward(across, residuals, d_out):
    q, k, v, tiles, reach, out, lse = residuals
    k, v = _gathered(k, across), _gathered(v, across)
    blocks, size = tiles.segment.shape[1:]
    scale = q.shape[-1] ** -0.5
    # sum over the keys of weight * its gradient (the paper's D)
    delta = jnp.einsum("BnKXH,BnKXH->BnKX", d_out, out, preferred_element_type=jnp.float32)

    def of_keys(row, key, carry):
        part_k, part_v = _at(k, row, key), _at(v, row, key)
        queries = _at(tiles.queries, row, key)

        def tile(index, carry):
            d_q, d_k, d_v = carry
            query = queries[index]
            part, d_part = _at(q, row, query), _at(d_out, row, query)
            scores, counts = _scores(part, part_k, tiles, reach, row, query, key)
            by_head = scores.shape[:3]
            of_lse = _at(lse, row, query).reshape(by_head)[..., None]
            weight = jnp.where(counts, jnp.exp(scores - of_lse), 0.0)
            d_weight = jnp.einsum(
                "KXH,KSH->KXS", d_part, part_v, preferred_element_type=jnp.float32
            ).reshape(scores.shape)
            of_delta = _at(delta, row, query).reshape(by_head)[..., None]
            d_scores = weight * (d_weight - of_delta) * scale
            weight, d_scores = (
                x.reshape(*part.shape[:2], size).astype(q.dtype) for x in (weight, d_scores)
            )
            product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            d_k += product("KXS,KXH->KSH", d_scores, part)
            d_v += product("KXS,KXH->KSH", weight, d_part)
            add = product("KXS,KSH->KXH", d_scores, part_k)
            return _put(d_q, _at(d_q, row, query) + add, row, query), d_k, d_v

        d_q, d_ks, d_vs = carry
        init = d_q, *(jnp.zeros(part_k.shape, jnp.float32) for _ in range(2))
        number = tiles.num_queries[row, key]
        d_q, d_k, d_v = bounded_loop(number, tile, init, most=blocks)
        return d_q, _put(d_ks, d_k, row, key), _put(d_vs, d_v, row, key)

    start = jnp.zeros(q.shape, jnp.float32), jnp.zeros_like(k), jnp.zeros_like(v)
    d_q, d_k, d_v = _over_blocks(tiles.num_queries, of_keys, start)
    return d_q.astype(q.dtype), _summed(d_k, across), _summed(d_v, across), None, None


_attention.defvjp(_forward, _backward)
