"""Attention between the patches of one segment, both ways: by a mask, or by tiles.

B rows, N patches, A heads, H head dim, C patches of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.attention import masked_attention, whole_rows
from distflow_jax.models.block_attention import block_attention
from distflow_jax.models.kernels.tiles import Tiles, tiles_of
from distflow_jax.parallel.rules import local


class Form(NamedTuple):
    """How attention is computed."""

    block: int = 0  # C, a divisor of N; 0: all scores of a row at once
    by: str = "loops"  # one of block_attention.IMPLEMENTATIONS
    head_dim: int = 0  # to which a kernel's heads are padded; 0: they are not


WHOLE = Form()
Pairs = jax.Array | Tiles  # segments int32 [B, N], or tiles of them


def pairs_of(segments: jax.Array, form: Form) -> Pairs:
    """The pairs of patches with equal segment numbers int32 [B, N], except 0."""
    if not form.block:
        return segments
    # a query's place is behind all keys, so that tiles and kernels leave out no later key
    in_row = whole_rows(segments)
    in_row = in_row._replace(place_BT=in_row.place_BT + segments.shape[1])
    return tiles_of(segments, segments, form.block, in_row)


def chosen(windowed: jax.Array, near: Pairs, every: Pairs) -> Pairs:
    """The pairs `near` if `windowed`, a bool scalar, else `every`."""
    return jax.tree.map(lambda a, b: jnp.where(windowed, a, b), near, every)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, form: Form) -> jax.Array:
    """softmax(q k / sqrt(H)) v over the pairs, [B, N, A, H] like q, k and v."""
    if not isinstance(pairs, Tiles):
        query, key = pairs[:, :, None], pairs[:, None, :]
        return masked_attention(q, k, v, (query == key) & (query > 0))
    size = q.shape[3]
    heads = ("tower_rows", "length", "tower_heads", "head_dim")
    of_pairs = Tiles(*(("tower_rows", *["length"] * (x.ndim - 1)) for x in pairs))

    def on_device(q, k, v, tiles):
        if form.head_dim > size:  # scores are divided by the root of the padded size
            q = q * (form.head_dim / size) ** 0.5
            q, k, v = (_padded(x, form.head_dim) for x in (q, k, v))
        return block_attention(q, k, v, tiles, implementation=form.by)[..., :size]

    return local(on_device, (q, k, v, pairs), (heads, heads, heads, of_pairs), heads)


def _padded(x: jax.Array, head_dim: int) -> jax.Array:
    """x [B, N, A, H] with zeros behind its heads, [B, N, A, head_dim]."""
    return jnp.pad(x, (*[(0, 0)] * 3, (0, head_dim - x.shape[3])))
