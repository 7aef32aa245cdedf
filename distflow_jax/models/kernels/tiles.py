"""Lists of the tiles of packed rows in which any query may attend to a key.

B rows or shards of rows, T tokens of one, S tokens of a whole row, C tokens of a block, n = T / C
and m = S / C blocks. A tile is a block of queries times a block of keys.
`flash_cost` estimates what kernels over tiles cost, for XLA's scheduler and for plans of runs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from distflow_jax.models.attention import InRow, whole_rows


class Tiles(NamedTuple):
    """For each block of queries the blocks of keys to visit, and the reverse."""

    segment: jax.Array  # int32 [B, n, C]
    parent: jax.Array  # int32 [B, n, C]
    place: jax.Array  # int32 [B, n, C]: index in the row of the last key that a query may see
    key_segment: jax.Array  # int32 [B, m, C]
    key_place: jax.Array  # int32 [B, m]: index in the row of each block's first token
    keys: jax.Array  # int32 [B, n, m]: per block of queries, the blocks of keys to visit first
    num_keys: jax.Array  # int32 [B, n]: number of these
    queries: jax.Array  # int32 [B, m, n]: per block of keys, the blocks of queries to visit first
    num_queries: jax.Array  # int32 [B, m]: number of these


class Reach(NamedTuple):
    """A sliding window, with the arguments of attention.within."""

    position_BT: jax.Array  # int32: positions of the queries in their sequences
    key_position_BS: jax.Array  # int32: of the keys of the whole row
    window: jax.Array | int  # int32


def tiles_of(
    segment_BT: jax.Array,
    parent_BT: jax.Array,
    block: int,
    in_row: InRow | None = None,
    reach: Reach | None = None,
) -> Tiles:
    """Tiles with at least one pair that attention.packed_mask allows, and `reach` if given.

    The tokens of a block must be consecutive in the row. A query's place in `in_row` may lie behind
    its token, which then attends to related keys up to there. Raises ValueError if `block` does not
    divide T.
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
    place, key_place = in_row.place_BT.reshape(segment.shape), in_row.place_BS[:, ::block]

    of_query = [segment, parent]
    if reach is not None:
        of_query.append(reach.position_BT.reshape(segment.shape))
        key_position = reach.key_position_BS.reshape(of_row.shape)

    # one block of queries at a time: XLA:CPU materializes the comparison, [T, S] for whole rows
    def of_queries(query):
        own, shared, *position = (x[:, :, None, None] for x in query)
        key = of_row[:, None]
        counts = ((own == key) | (shared == key)) & (own > 0)
        if reach is not None:
            counts &= position[0] - key_position[:, None] < reach.window
        return jnp.any(counts, axis=(1, 3))

    related = jax.lax.map(of_queries, tuple(x.swapaxes(0, 1) for x in of_query))
    related = related.swapaxes(0, 1)
    related &= jnp.max(place, axis=2)[:, :, None] >= key_place[:, None, :]

    def listed(related):  # True entries first, in their order
        order = jnp.argsort(~related, axis=2, stable=True).astype(jnp.int32)
        return order, related.sum(2, dtype=jnp.int32)

    keys, queries = listed(related), listed(related.swapaxes(1, 2))
    return Tiles(segment, parent, place, of_row, key_place, *keys, *queries)


def either(condition: jax.Array, near: Tiles, every: Tiles) -> Tiles:
    """The tiles `near` if `condition`, a bool scalar, else `every`; both of the same rows."""
    lists = ("keys", "num_keys", "queries", "num_queries")
    return every._replace(
        **{name: jnp.where(condition, getattr(near, name), getattr(every, name)) for name in lists}
    )


_PADDING_QUERY = -1  # segment of padding queries: no key has it


def mask_facts(tiles: Tiles, reach: Reach | None) -> tuple[jax.Array, jax.Array]:
    """Arguments of `pair_mask`, int32: [B, n, 4, C] of queries and [B, m, 3, C] of keys.

    Positions of `reach` are [B, n, C] and [B, m, C].
    """
    within = jnp.arange(tiles.segment.shape[2], dtype=jnp.int32)[None, None]
    place, key_place = tiles.place, tiles.key_place[..., None] + within
    before, position = jnp.full_like(place, -1), jnp.zeros_like(key_place)
    if reach is not None:
        before, position = reach.position_BT - reach.window, reach.key_position_BS
    own, parent = (
        jnp.where(tiles.segment > 0, x, _PADDING_QUERY) for x in (tiles.segment, tiles.parent)
    )
    of_query = jnp.stack([own, parent, place, before], axis=2)
    return of_query, jnp.stack([tiles.key_segment, key_place, position], axis=2)


def pair_mask(
    own: jax.Array,
    parent: jax.Array,
    place: jax.Array,
    before: jax.Array,
    segment: jax.Array,
    key_place: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """Mask of allowed pairs, bool: four facts of queries and three of keys, broadcast together.

    E.g. [C, 1] of queries and [1, C] of keys; see mask_facts.
    """
    related = (segment == own) | (segment == parent)
    return related & (key_place <= place) & (position > before)


def flash_cost(q: jax.Array, k: jax.Array, *, products: int, moved: int) -> pl.CostEstimate:
    """Upper bound of a kernel's cost, reached if every row is a single sequence.

    The kernel computes `products` matrix products in each tile on or below the diagonal and reads
    `moved` bytes, each once. q is [B, n, K, X, H], k [B, m, K, C, H]. A whole row has at most
    m (m + 1) / 2 tiles under any packing, divided equally among the shards of a row.
    """
    rows, blocks, kv_heads, queries, head_dim = q.shape
    tiles = rows * blocks * (k.shape[1] + 1) // 2
    scores = tiles * kv_heads * queries * k.shape[3]
    return pl.CostEstimate(
        flops=2 * products * scores * head_dim, transcendentals=scores, bytes_accessed=moved
    )


def nbytes(*arrays: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Total bytes of the arrays, of any shape."""
    return sum(x.size * x.dtype.itemsize for x in arrays)
