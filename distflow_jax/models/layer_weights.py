"""Two ways to hold the layers' weights, and their products with activations.

"stacked": one array [layers, inputs, outputs] per parameter, as the trainer has it; a scan walks
through it. "apart": a dict of arrays per layer, each [outputs, inputs]; of experts [experts,
outputs, inputs]. Where a product is a call of a library, as on CPUs and GPUs, a scan copies each
layer's weights before it multiplies; and on CPUs a product of few rows takes half the time when the
weights are its left side. TPUs have neither problem.

X rows (tokens), I inputs, O outputs.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from distflow_jax.models.int8 import Int8
from distflow_jax.parallel.rules import sharding

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


Dims = tuple[tuple[str, ...], tuple[int, ...]]  # names of the dims, and which are inputs


def set_apart(params: dict[str, Any], dims: dict[str, Dims]) -> dict[str, Any]:
    """Stacked parameters as weights apart, with the same layout of each dim.

    `dims`: those of each parameter, by its path. `params` is emptied as it is read, so that no more
    than one array is there twice where nobody else holds it.
    """
    stacked, head = params.pop("layers"), params.pop("head", None)
    count = len(jax.tree.leaves(stacked)[0])
    layers: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in list(stacked):
        axes, inputs = dims[f"layers/{name}"]
        parts = _split(stacked.pop(name), axes[1:], tuple(d - 1 for d in inputs))
        for layer, part in zip(layers, parts, strict=True):
            layer[name] = part
    if head is not None:
        (params["head"],) = _split(jax.tree.map(lambda x: x[None], head), *dims["head"])
    return params | {"layers": layers}


def _split(stacked: Any, axes: tuple[str, ...], inputs: tuple[int, ...]) -> Sequence[Any]:
    # outputs first; what has no inputs (a norm, a bias, a router) stays as it is
    order = tuple(d for d in range(len(axes)) if d not in inputs) + inputs
    if not isinstance(stacked, Int8):
        return _split_array(stacked, axes, order)
    outputs = tuple(range(stacked.scale.ndim - 1))
    scales = _split_array(stacked.scale, [axes[order[d]] for d in outputs], outputs)
    values = _split_array(stacked.values, axes, order)
    return [Int8(*each) for each in zip(values, scales, strict=True)]


def _split_array(
    stacked: jax.Array, axes: Sequence[str], order: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    dims, shape = zip(*((axes[d], stacked.shape[1:][d]) for d in order), strict=True)
    layout = sharding(stacked.sharding.mesh, dims, shape)
    return _split_program(stacked, order, layout)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _split_program(
    stacked: jax.Array, order: tuple[int, ...], layout: NamedSharding
) -> tuple[jax.Array, ...]:
    parts = (x.transpose(order) for x in stacked)
    return tuple(jax.lax.with_sharding_constraint(x, layout) for x in parts)
