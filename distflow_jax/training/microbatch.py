"""Micro-batches of an optimizer step inside one compiled program, and checks of their sizes.

Rows are rank-major: [R, ...] = [ranks, steps, micro, ...]. A micro-batch takes `micro` rows of each
data rank, so nothing moves between ranks. The number of micro-batches to process is a traced number
that is equal on all devices: empty rows cost nothing, and nothing recompiles. On a mesh with a
pipeline axis a step takes several micro-batches, which pass the pipeline stages one after another
(parallel/pipeline.py).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.parallel.mesh import MeshSizes
from distflow_jax.parallel.rules import constrain


def pipeline_microbatches(setting: int, pipelines: Sequence[int]) -> int:
    """Resolves training.pipeline_microbatches to the micro-batches in the pipeline at once.

    `pipelines` are the sizes of the pipeline axis of all training meshes; each divides the result,
    which is 1 if all of them are 1. Raises ValueError for other settings.
    """
    unit = math.lcm(*pipelines)
    if setting > 1 and unit == 1:
        raise ValueError(
            f"training.pipeline_microbatches={setting} needs a pipeline, and mesh.pipeline is "
            "1; use 0, or mesh.pipeline above 1"
        )
    if setting % unit:
        low, high = setting // unit * unit, -(-setting // unit) * unit
        raise ValueError(
            f"training.pipeline_microbatches={setting} is not divisible by mesh.pipeline={unit}; "
            f"use {f'{low} or {high}' if low else high}"
        )
    return setting or unit


def check_pipeline_is_filled(mesh: MeshSizes, rows: int, micro: int, microbatches: int) -> None:
    """Raises ValueError if an optimizer step of at most `rows` rows cannot fill the pipeline.

    `micro` is the rows of a micro-batch per data rank; `microbatches` of them are in the pipeline
    at once.
    """
    of_one = mesh.ranks * micro
    if mesh.pipeline == 1 or rows >= of_one * microbatches:
        return
    if rows >= of_one * mesh.pipeline:
        fix = f"training.pipeline_microbatches={rows // of_one // mesh.pipeline * mesh.pipeline}"
    elif rows >= mesh.ranks * mesh.pipeline:
        most = rows // (mesh.ranks * mesh.pipeline)
        fix = f"training.micro_batch_rows={most * mesh.ranks}"
    elif rows >= mesh.pipeline:
        fix = f"at most {rows // mesh.pipeline} data ranks (mesh.data x mesh.fsdp)"
    else:
        fix = f"a mesh.pipeline of at most {rows}"
    raise ValueError(
        f"mesh.pipeline={mesh.pipeline} works on {microbatches} micro-batches of {of_one} rows at "
        f"once, and an optimizer step fills at most {rows} rows; use {fix}, more prompts "
        "(data.prompts_per_step) or shorter rows (training.row_tokens)"
    )


def split(tree: Any, ranks: int, micro: int) -> Any:
    """[R, ...] -> [ranks, steps, micro, ...] for every leaf; ranks * micro must divide R."""

    def one(x):
        return x.reshape(ranks, x.shape[0] // (ranks * micro), micro, *x.shape[1:])

    return jax.tree.map(one, tree)


def num_filled(segment: jax.Array) -> jax.Array:
    """Number of micro-batches up to the last one with a token, int32.

    `segment` is split: [ranks, steps, micro, L].
    """
    filled = jnp.any(segment > 0, axis=(0, 2, 3))
    steps = jnp.arange(1, filled.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(filled, steps, 0))


def take(tree: Any, index: jax.Array) -> Any:
    """Micro-batch `index` of a split tree: leaves [ranks * micro, ...], rows divided over ranks."""

    def one(x):
        rows = jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)
        rows = rows.reshape(x.shape[0] * x.shape[2], *x.shape[3:])
        return constrain(rows, "rows", *["length"] * (rows.ndim - 1))

    return jax.tree.map(one, tree)


def write(out: jax.Array, result: jax.Array, index: jax.Array) -> jax.Array:
    """Writes the result [ranks * micro, ...] of micro-batch `index` into the split array `out`."""
    result = result.reshape(out.shape[0], 1, out.shape[2], *out.shape[3:])
    return jax.lax.dynamic_update_slice_in_dim(out, result, index, axis=1)


def join(out: jax.Array) -> jax.Array:
    """Inverse of split for one array: [ranks, steps, micro, ...] -> [R, ...]."""
    return out.reshape(-1, *out.shape[3:])
