"""Grouped matrix product: rows sorted by group, times one matrix per group.

On TPUs `jax.lax.ragged_dot_general` computes it directly, as does tokamax's on TPUs and GPUs.
Elsewhere XLA may expand it into a copy of all rows for each group, zero outside the group, times
all matrices: E times the memory and work. There a loop visits blocks of rows, each of one group.
Gale et al. 2022 (arxiv.org/abs/2211.15841, sec. 4) pad groups to whole blocks; here blocks overlap,
and each writes its own group's rows only.

M rows, E groups, I inputs, O outputs, C rows of a block.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.int8 import Int8, times
from distflow_jax.models.matmul_layouts import by_input, by_output
from distflow_jax.programs.bounded_loops import bounded_loop

_BLOCKS = (16, 256)  # fewest and most rows of a block


def grouped_product(
    x_MI: jax.Array,
    weight: jax.Array | Int8,
    sizes: jax.Array,
    turned: bool = False,
    by: str = "blocks",
) -> jax.Array:
    """Rows times the matrix of their group, [M, O] in the dtype of `x_MI`.

    Args:
      x_MI: rows, those of group 0 first, then those of group 1 and so on.
      weight: [E, I, O], or [E, O, I] if `turned`; in the dtype of `x_MI`, or int8.
      sizes: int32 [E], rows of each group; they sum to M.
      turned: whether outputs precede inputs in `weight`.
      by: "blocks", or a name of RAGGED_DOT.
    """
    if isinstance(weight, Int8):  # only samplers use int8, and they need no gradient
        return _product(x_MI, weight, sizes, turned, by)
    return _differentiable(x_MI, weight, sizes, turned, by)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _differentiable(x, weight, sizes, turned, by):
    return _product(x, weight, sizes, turned, by)


def _forward(x, weight, sizes, turned, by):
    return _product(x, weight, sizes, turned, by), (x, weight, sizes)


def _backward(turned, by, residuals, cotangent):
    x, weight, sizes = residuals
    d_x = _product(cotangent, weight, sizes, not turned, by)
    outer = _block_outer if by == "blocks" else functools.partial(_ragged_outer, RAGGED_DOT[by])
    sides = (cotangent, x) if turned else (x, cotangent)
    return d_x, outer(*sides, sizes).astype(weight.dtype), None


_differentiable.defvjp(_forward, _backward)


def _product(x, weight, sizes, turned, by):
    if by == "blocks":
        return _block_product(x, weight, sizes, turned)
    return _ragged_product(RAGGED_DOT[by], x, weight, sizes, turned)


# -- by the instruction ----------------------------------------------------------------------------


def _by_tokamax(*arguments, **options):
    tokamax = importlib.import_module("tokamax")  # an optional package
    return tokamax.ragged_dot_general(*arguments, **options)


RAGGED_DOT = {"ragged_dot": jax.lax.ragged_dot_general, "tokamax": _by_tokamax}


def _ragged_product(
    dot: Callable[..., jax.Array],
    x: jax.Array,
    weight: jax.Array | Int8,
    sizes: jax.Array,
    turned: bool,
) -> jax.Array:
    dims = jax.lax.RaggedDotDimensionNumbers((([1], [2 if turned else 1]), ([], [])), [0], [0])

    def product(x, matrices):
        return dot(x, matrices, sizes, dims)

    if not isinstance(weight, Int8):
        return product(x, weight)
    y = product(x, weight.values.astype(x.dtype))
    group = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(x))
    return (y.astype(jnp.float32) * weight.scale[group]).astype(x.dtype)


def _ragged_outer(
    dot: Callable[..., jax.Array], x: jax.Array, y: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Sum over the rows of each group of x_m y_m^T, float32 [E, I, O]."""
    dims = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    return dot(x, y, sizes, dims, preferred_element_type=jnp.float32)


# -- by blocks -------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """Blocks of at most C rows of one group; block j covers rows first[j] to last[j] - 1."""

    count: jax.Array  # int32: blocks in use
    group: jax.Array  # int32 [most]
    first: jax.Array  # int32 [most]
    last: jax.Array  # int32 [most]

    def at(self, index: jax.Array, rows: int, size: int) -> tuple[jax.Array, jax.Array]:
        """Start row of a block (scalar), and a mask [C, 1] of the rows that belong to its group."""
        # the last blocks start early enough to end with the rows
        start = jnp.minimum(self.first[index], rows - size)
        row = start + jnp.arange(size, dtype=jnp.int32)
        return start, ((row >= self.first[index]) & (row < self.last[index]))[:, None]


def block_size(rows: int, groups: int) -> int:
    """C, rows of a block: the rows per group rounded up to a power of two, within _BLOCKS."""
    least, most = _BLOCKS
    size = least
    while size < most and size * groups < rows:
        size *= 2
    return min(size, rows)


def _blocks(sizes: jax.Array, rows: int, size: int) -> _Blocks:
    most = _most(rows, len(sizes), size)
    end = jnp.cumsum(sizes, dtype=jnp.int32)
    needed = (sizes + (size - 1)) // size
    before = jnp.cumsum(needed, dtype=jnp.int32)
    nth = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(before[None] <= nth[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, len(sizes) - 1)  # for entries after the last block
    first = (end - sizes)[group] + (nth - (before - needed)[group]) * size
    return _Blocks(before[-1], group, first, end[group])


def _most(rows: int, groups: int, size: int) -> int:
    """Largest number of blocks, for any distribution of the rows over the groups."""
    return min(rows, rows // size + groups)


def _block_product(
    x: jax.Array, weight: jax.Array | Int8, sizes: jax.Array, turned: bool
) -> jax.Array:
    rows, groups = len(x), len(sizes)
    size = block_size(rows, groups)
    blocks = _blocks(sizes, rows, size)
    product = by_output if turned else by_input

    def body(index, y):
        start, own = blocks.at(index, rows, size)
        matrix = jax.tree.map(lambda w: _pick(w, blocks.group[index]), weight)
        new = times(product, _rows(x, start, size), matrix)
        new = jnp.where(own, new, _rows(y, start, size))
        return jax.lax.dynamic_update_slice_in_dim(y, new, start, axis=0)

    values = weight.values if isinstance(weight, Int8) else weight
    y = jnp.zeros((rows, values.shape[1 if turned else 2]), x.dtype)
    return bounded_loop(blocks.count, body, y, most=_most(rows, groups, size))


def _block_outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sum over the rows of each group of x_m y_m^T, float32 [E, I, O], as _ragged_outer."""
    rows, groups = len(x), len(sizes)
    size = block_size(rows, groups)
    blocks = _blocks(sizes, rows, size)

    def body(index, total):
        start, own = blocks.at(index, rows, size)
        block, group = jnp.where(own, _rows(x, start, size), 0), blocks.group[index]
        new = jnp.einsum(
            "CI,CO->IO", block, _rows(y, start, size), preferred_element_type=jnp.float32
        )
        new = _pick(total, group) + new
        return jax.lax.dynamic_update_index_in_dim(total, new, group, axis=0)

    total = jnp.zeros((groups, x.shape[1], y.shape[1]), jnp.float32)
    return bounded_loop(blocks.count, body, total, most=_most(rows, groups, size))


def _rows(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=0)


def _pick(x: jax.Array, index: jax.Array) -> Any:
    return jax.lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False)
