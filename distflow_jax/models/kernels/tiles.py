"""Which tiles of the scores of packed rows hold a pair of tokens that counts.

B rows or parts of rows, T tokens of one, S tokens of a whole row, C tokens of a block, n = T / C
and m = S / C blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.attention import InRow, whole_rows


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


_NOBODY = -1  # the segment of queries that are padding: no key has it


def mask_facts(tiles: Tiles, reach: Reach | None) -> tuple[jax.Array, jax.Array]:
    """What `counting` compares, int32: [B, n, 4, C] of queries and [B, m, 3, C] of keys.

    `reach`: positions [B, n, C] and [B, m, C].
    """
    within = jnp.arange(tiles.segment.shape[2], dtype=jnp.int32)[None, None]
    place, key_place = (x[..., None] + within for x in (tiles.place, tiles.key_place))
    before, position = jnp.full_like(place, -1), jnp.zeros_like(key_place)
    if reach is not None:
        before, position = reach.position_BT - reach.window, reach.key_position_BS
    own, parent = (jnp.where(tiles.segment > 0, x, _NOBODY) for x in (tiles.segment, tiles.parent))
    of_query = jnp.stack([own, parent, place, before], axis=2)
    return of_query, jnp.stack([tiles.key_segment, key_place, position], axis=2)


def counting(
    own: jax.Array,
    parent: jax.Array,
    place: jax.Array,
    before: jax.Array,
    segment: jax.Array,
    key_place: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """Which pairs count, bool: four facts of queries and three of keys, which broadcast."""
    related = (segment == own) | (segment == parent)
    return related & (key_place <= place) & (position > before)
