"""Layouts of the layers' weights in memory, and products of activations with them.

"stacked": one array [layers, inputs, outputs] per parameter, as in the trainer; a scan runs over
the layers.

"apart": a dict of arrays per layer, each [outputs, inputs], for experts [experts, outputs, inputs].
On CPUs and GPUs products are calls of a library, and a scan copies each layer's weights before such
a call. On CPUs, a product of few rows also takes half the time with the weights as its left side.
Neither applies to TPUs.

"turned", for TPUs: stacked, with the model's hidden dim last in every matrix; a matrix whose inputs
are the hidden dim is marked as `Turned`. TPUs pad the last dim of an array to a multiple of 128,
and XLA chooses the layout of arguments that wastes least. A device's shard of heads or of the MLP
is often no multiple of 128, whereas the hidden dim, which tensor parallelism does not divide,
nearly always is. In any other layout, a program starts by copying all these matrices. Experts' gate
and up are turned, too.

X rows (tokens), I inputs, O outputs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

WEIGHTS = ("auto", "stacked", "turned", "apart")
_FEW_ROWS = 256  # below it, weights as the left side are faster on CPUs


class Turned(NamedTuple):
    """A matrix, or a stack of them, with outputs before inputs: [..., outputs, inputs]."""

    weight: Any  # an array, or Int8


def resolve_layout(weights: str, platform: str) -> str:
    """Resolves "auto" to the layout of a sampler's weights on `platform`.

    Raises ValueError unless `weights` is one of WEIGHTS.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if weights != "auto":
        return weights
    return "turned" if platform == "tpu" else "apart"


def in_order(x: jax.Array) -> jax.Array:
    """x of any shape, with its dims in order in memory: a user's layout is not that of its source.

    XLA otherwise gives a slice of stacked layers, and thereby their stack, the layout of its user.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def by_input(x: jax.Array, weight: jax.Array, inputs: int = 1, dtype: Any = None) -> jax.Array:
    """x [X, I] times a weight whose first `inputs` dims are I: [X, *outputs], in `dtype`."""
    matrix = weight.reshape(-1, *weight.shape[inputs:])
    return jnp.tensordot(x, matrix, 1, preferred_element_type=dtype)


def by_output(x: jax.Array, weight: jax.Array, inputs: int = 1, dtype: Any = None) -> jax.Array:
    """x [X, I] times a weight whose last `inputs` dims are I: [X, *outputs], in `dtype`."""
    outputs = weight.shape[:-inputs]
    matrix = weight.reshape(-1, x.shape[1])
    if len(x) < _FEW_ROWS:
        # without the barrier XLA swaps the operands again
        y = jnp.einsum("OI,XI->OX", matrix, x, preferred_element_type=dtype)
        y = jax.lax.optimization_barrier(y).T
        return y.reshape(len(x), *outputs)
    return by_row(x, weight, inputs, dtype)


def by_row(x: jax.Array, weight: jax.Array, inputs: int = 1, dtype: Any = None) -> jax.Array:
    """As `by_output` with x [X, I], without a fixed order of operands: XLA chooses it."""
    matrix = weight.reshape(-1, x.shape[1])
    y = jnp.einsum("XI,OI->XO", x, matrix, preferred_element_type=dtype)
    return y.reshape(len(x), *weight.shape[:-inputs])
