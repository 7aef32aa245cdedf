"""Numbers as int8 with a float32 scale, and a sampler's matrices kept so.

A matrix has a scale for each of its outputs, an embedding for each of its rows: then the scale is
the same for all that a product sums over, and is taken out of the sum,

    sum_i x_i (W_io s_o) = s_o sum_i x_i W_io,

so that int8 is what TPUs and GPUs read from memory, converted on its way into the product (every
int8 is exact in bfloat16). A CPU's products are calls of a library that takes floats: there XLA
converts a program's weights before it uses them. Jacob et al. 2018, arxiv.org/abs/1712.05877, with
a scale per channel and zero at zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Int8(NamedTuple):
    """values * scale, with scale broadcast over the inputs."""

    values: jax.Array  # int8, in the shape of the weight
    scale: jax.Array  # float32, the weight's shape without its inputs

    @property
    def T(self) -> "Int8":
        """A matrix whose inputs and outputs have changed places; a scale per output still."""
        return Int8(self.values.T, self.scale)


def quantise(x: jax.Array, dims: tuple[int, ...] = (-1,)) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 over `dims`: (int8 like x, scale float32 of the other dims).

    scale = max |x| / 127 and |x - int8 scale| <= scale / 2, up to float32's rounding. A row with
    inf or nan has a scale that is neither zero nor finite: it comes back as nan, not as a number.
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=dims, keepdims=True) / 127
    # a row of zeros has scale 0: its quotient would be nan
    whole = jnp.where(scale > 0, jnp.round(x / scale), 0)
    return whole.astype(jnp.int8), jnp.squeeze(scale, dims)


def times(
    product: Callable[..., jax.Array],
    x: jax.Array,
    weight: jax.Array | Int8,
    inputs: int = 1,
    dtype: Any = None,
) -> jax.Array:
    """product(x, weight, inputs, dtype) in the dtype of `x` [X, I], however the weight is kept:
    [X, *outputs], in `dtype` (default: that of `x`)."""
    if not isinstance(weight, Int8):
        return product(x, weight.astype(x.dtype), inputs, dtype)
    y = product(x, weight.values.astype(x.dtype), inputs, dtype)
    return (y.astype(jnp.float32) * weight.scale[None]).astype(y.dtype)


def lookup(table: jax.Array | Int8, index: jax.Array, dtype: Any) -> jax.Array:
    """Rows of a table [V, D], however it is kept: [*index, D] in `dtype`."""
    if not isinstance(table, Int8):
        return table.astype(dtype)[index]
    return (table.values[index].astype(jnp.float32) * table.scale[index][..., None]).astype(dtype)
