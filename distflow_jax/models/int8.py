"""Symmetric int8 quantisation with float32 scales, and products with quantised weights.

A matrix has one scale per output, an embedding one per row. The scale is therefore constant over
the dim that a product sums over and moves out of the sum,

    sum_i x_i (W_io s_o) = s_o sum_i x_i W_io,

so TPUs and GPUs read int8 from memory and convert it on its way into the product (every int8 is
exact in bfloat16). On CPUs, products call a library that takes floats, so XLA converts the weights
first. Jacob et al. 2018, arxiv.org/abs/1712.05877, with a scale per channel and no zero point.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Int8(NamedTuple):
    """A quantised weight, values * scale, with scale broadcast over the inputs."""

    values: jax.Array  # int8, in the shape of the weight
    scale: jax.Array  # float32, the weight's shape without its inputs

    @property
    def T(self) -> "Int8":
        """The transposed matrix, with one scale per output as before."""
        return Int8(self.values.T, self.scale)


def quantise(x: jax.Array, dims: tuple[int, ...] = (-1,)) -> tuple[jax.Array, jax.Array]:
    """Quantises x of any shape symmetrically over `dims`.

    Returns int8 values shaped as x, and float32 scales with the remaining dims: scale = max |x| /
    127 and |x - int8 scale| <= scale / 2, up to float32's rounding. The scale of a row with inf or
    nan is neither zero nor finite, so the row dequantises to nan, not to numbers.
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=dims, keepdims=True) / 127
    # the scale of a row of zeros is 0, and its quotient would be nan
    whole = jnp.where(scale > 0, jnp.round(x / scale), 0)
    return whole.astype(jnp.int8), jnp.squeeze(scale, dims)


def times(
    product: Callable[..., jax.Array],
    x: jax.Array,
    weight: jax.Array | Int8,
    inputs: int = 1,
    dtype: Any = None,
) -> jax.Array:
    """product(x, weight, inputs, dtype) with a weight in floats or int8, [X, *outputs].

    Computed in the dtype of `x` [X, I]; the result has `dtype`, by default that of `x`.
    """
    if not isinstance(weight, Int8):
        return product(x, weight.astype(x.dtype), inputs, dtype)
    y = product(x, weight.values.astype(x.dtype), inputs, dtype)
    return (y.astype(jnp.float32) * weight.scale[None]).astype(y.dtype)


def lookup(table: jax.Array | Int8, index: jax.Array, dtype: Any) -> jax.Array:
    """Rows `index` of a table [V, D] in floats or int8: [*index, D] in `dtype`."""
    if not isinstance(table, Int8):
        return table.astype(dtype)[index]
    return (table.values[index].astype(jnp.float32) * table.scale[index][..., None]).astype(dtype)
