"""Walking over the micro-batches of a step inside one compiled program.

Rows lie rank-major: [R, ...] = [ranks, steps, micro, ...]; a micro-batch takes `micro` rows of each
rank, so that nothing moves between ranks. How many are worked off is a traced number, the same on
every device: empty rows cost nothing and nothing recompiles. Where the mesh has stages, a step
takes several micro-batches at once, which follow each other through them (parallel/pipeline.py).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.parallel.mesh import MeshSizes
from distflow_jax.parallel.pipeline import check_repeats
from distflow_jax.parallel.rules import constrain


def microbatches_of_stages(asked: int, stages: Sequence[int]) -> int:
    """How many micro-batches go through the stages at once, for training.pipeline_microbatches.

    `stages`: those of every training mesh; each divides the number. 1 where none has any.
    """
    unit = math.lcm(*stages)
    if asked > 1 and unit == 1:
        raise ValueError(
            f"training.pipeline_microbatches={asked} is for a mesh with stages, and "
            "mesh.pipeline is 1; use 0, or mesh.pipeline above 1"
        )
    if asked % unit:
        low, high = asked // unit * unit, -(-asked // unit) * unit
        raise ValueError(
            f"training.pipeline_microbatches={asked} is not divisible by mesh.pipeline={unit}; use "
            f"{f'{low} or {high}' if low else high}"
        )
    return asked or unit


def check_rounds_of_stages(repeats: int, stages: Sequence[int], layers: int) -> None:
    """ValueError unless training.pipeline_repeats suits the stages of every training mesh."""
    if repeats > 1 and max(stages) == 1:
        raise ValueError(
            f"training.pipeline_repeats={repeats} is for a mesh with stages, and "
            "mesh.pipeline is 1; use 1, or mesh.pipeline above 1"
        )
    for count in stages:
        if count > 1:
            check_repeats(repeats, count, layers)


def check_stages_are_filled(mesh: MeshSizes, rows: int, micro: int, microbatches: int) -> None:
    """ValueError where an optimizer step of at most `rows` rows would leave micro-batches empty.

    `micro`: rows of a micro-batch per data rank; `microbatches` of them go through the stages at
    once.
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
    """[R, ...] -> [ranks, steps, micro, ...] on every leaf; R must be divisible by ranks *
    micro."""

    def one(x):
        return x.reshape(ranks, x.shape[0] // (ranks * micro), micro, *x.shape[1:])

    return jax.tree.map(one, tree)


def num_filled(segment: jax.Array) -> jax.Array:
    """How many micro-batches hold any token; `segment` is split, [ranks, steps, micro, L]."""
    filled = jnp.any(segment > 0, axis=(0, 2, 3))
    steps = jnp.arange(1, filled.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(filled, steps, 0))


def take(tree: Any, index: jax.Array) -> Any:
    """Micro-batch `index` of a split tree: leaves [ranks * micro, ...], rows divided over ranks."""

    def one(x):
        part = jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)
        part = part.reshape(x.shape[0] * x.shape[2], *x.shape[3:])
        return constrain(part, "rows", *["length"] * (part.ndim - 1))

    return jax.tree.map(one, tree)


def put(out: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    """Writes a micro-batch's result [ranks * micro, ...] back into the split array `out`."""
    part = part.reshape(out.shape[0], 1, out.shape[2], *out.shape[3:])
    return jax.lax.dynamic_update_slice_in_dim(out, part, index, axis=1)


def join(out: jax.Array) -> jax.Array:
    """Inverse of split for one array."""
    return out.reshape(-1, *out.shape[3:])
