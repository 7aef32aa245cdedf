"""Ways to hold the layers' weights, and their products with activations.

"stacked": one array [layers, inputs, outputs] per parameter, as the trainer has it; a scan walks
through it. "apart": a dict of arrays per layer, each [outputs, inputs]; of experts [experts,
outputs, inputs]. Where a product is a call of a library, as on CPUs and GPUs, a scan copies each
layer's weights before it multiplies; and on CPUs a product of few rows takes half the time when the
weights are its left side. TPUs have neither problem.

"turned", for TPUs: stacked, with the model's hidden dim last in every matrix, `Turned` where that
is its inputs. A TPU's arrays are padded to 128 numbers in their last dim, and XLA lays an argument
out so that little is lost: what heads or an MLP leave for a device is often no multiple of 128, the
hidden dim, which no tensor group divides, nearly always is. Held in another order, a program begins
with copies of all these matrices.

X rows (tokens), I inputs, O outputs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

WEIGHTS = ("auto", "stacked", "turned", "apart")
_FEW_ROWS = 256  # below it, weights as the left side win on CPUs


class Turned(NamedTuple):
    """A matrix, or a stack of them, with its outputs before its inputs: [..., outputs, inputs]."""

    weight: Any  # an array, or Int8


def way_of(weights: str, platform: str) -> str:
    """How a sampler on `platform` holds layers, which "auto" leaves open. ValueError for an unknown
    way."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if weights != "auto":
        return weights
    return "turned" if platform == "tpu" else "apart"


def by_input(x: jax.Array, weight: jax.Array, inputs: int = 1, dtype: Any = None) -> jax.Array:
    """x [X, I] times a weight whose first `inputs` dims are I: [X, *outputs], in `dtype`."""
    matrix = weight.reshape(-1, *weight.shape[inputs:])
    return jnp.tensordot(x, matrix, 1, preferred_element_type=dtype)


def by_output(x: jax.Array, weight: jax.Array, inputs: int = 1, dtype: Any = None) -> jax.Array:
    """x [X, I] times a weight whose last `inputs` dims are I: [X, *outputs], in `dtype`."""
    outputs = weight.shape[:-inputs]
    matrix = weight.reshape(-1, x.shape[1])
    if len(x) < _FEW_ROWS:
        # without the barrier XLA turns the product around again
        y = jnp.einsum("OI,XI->OX", matrix, x, preferred_element_type=dtype)
        y = jax.lax.optimization_barrier(y).T
        return y.reshape(len(x), *outputs)
    return by_row(x, weight, inputs, dtype)


def by_row(x: jax.Array, weight: jax.Array, inputs: int = 1, dtype: Any = None) -> jax.Array:
    """As `by_output`, in the order that XLA chooses."""
    matrix = weight.reshape(-1, x.shape[1])
    y = jnp.einsum("XI,OI->XO", x, matrix, preferred_element_type=dtype)
    return y.reshape(len(x), *weight.shape[:-inputs])
