"""Two ways to hold the layers' weights, and their products with activations.

"stacked": one array [layers, inputs, outputs] per parameter, as the trainer has it; a scan walks
through it. "apart": a dict of arrays per layer, each [outputs, inputs]; of experts [experts,
outputs, inputs]. Where a product is a call of a library, as on CPUs and GPUs, a scan copies each
layer's weights before it multiplies; and on CPUs a product of few rows takes half the time when the
weights are its left side. TPUs have neither problem.

X rows (tokens), I inputs, O outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp

WEIGHTS = ("auto", "stacked", "apart")
_FEW_ROWS = 256  # below it, weights as the left side win on CPUs


def are_apart(weights: str, platform: str) -> bool:
    """Whether a sampler on `platform` holds each layer apart. ValueError for an unknown way."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    return weights == "apart" or (weights == "auto" and platform != "tpu")


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
    else:
        y = jnp.einsum("XI,OI->XO", x, matrix, preferred_element_type=dtype)
    return y.reshape(len(x), *outputs)
