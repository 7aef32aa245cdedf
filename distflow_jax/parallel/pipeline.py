"""Pipeline parallelism: stages of devices, each with a part of the layers, and micro-batches of
rows that go through one stage after the other.

B rows or parts of rows, T tokens of one, D hidden; S stages (the mesh axis `stage`), M
micro-batches, G groups of rows: of a data rank, or of a part there (context.py); r rows of a group
in a micro-batch, B = G M r.

GPipe's schedule (Huang et al. 2019, arxiv.org/abs/1811.06965): at tick t stage s works on
micro-batch t - s, and hands on what it made of it. After M + S - 1 ticks all are through; of each
stage's ticks S - 1 are idle, the bubble. The backward pass is the same in reverse, by
differentiating the loop. Before the first layer and behind the last one stages divide the rows, as
data ranks do: of M micro-batches each stage has M / S.

A stage is its own program, in which `stage` is no axis any more: what happens within it, over the
other axes of the mesh, is as it is without stages.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from distflow_jax.parallel.rules import active_mesh, constrain, divided, mesh_axes, width

# (x [B, T, D], a layer's inputs) -> (x, what the layer gives beside it)
Body = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def bubble_share(stages: int, microbatches: int) -> float:
    """The share of a stage's time in which it has nothing to do, (S - 1) / (M + S - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def scan_layers(
    body_of: Callable[[Any], Body],
    x_BTD: jax.Array,
    rows: Any,
    layers: Any,
    inputs: Any = None,
    *,
    microbatches: int = 0,
) -> tuple[jax.Array, Any]:
    """`jax.lax.scan(body_of(rows), x, (layers, inputs))`, through the stages where there are any.

    Args:
      body_of: makes the body of the scan for some of the rows.
      rows: pytree of arrays with rows in front, [B, ...], or [R, ...] where a row has several
        parts; those of a micro-batch go with it.
      layers: pytree of arrays with layers in front; stages divide them.
      inputs: pytree of arrays that differ by layer and row; with stages rows come second in them.
      microbatches: M, a multiple of S that divides the rows of a data rank; 0: S.

    What layers give beside x is, with stages, added up over the micro-batches: it has to be a sum
    over rows. Raises ValueError where M does not fit.
    """
    stages = width("layers")
    if stages == 1:
        return jax.lax.scan(body_of(rows), x_BTD, (layers, inputs))
    (axis,) = mesh_axes("layers")
    count = microbatches or stages
    of_group = x_BTD.shape[0] // width("parts")
    _check(of_group, count, stages)

    def cut(x, dim=0):  # [..., G M r, ...] -> [..., G, M, r, ...]
        assert hasattr(x, "shape"), f"{x} does not go with its rows: use jax.tree_util.Partial"
        before, size, behind = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
        assert size % of_group == 0, (x.shape, of_group)
        return x.reshape(*before, size // of_group, count, -1, *behind)

    run = jax.shard_map(
        functools.partial(_on_stage, body_of=body_of, axis=axis, stages=stages),
        mesh=active_mesh(),
        axis_names={axis},
        in_specs=(
            PartitionSpec(axis),
            PartitionSpec(None, axis),
            PartitionSpec(),
            PartitionSpec(axis),
            PartitionSpec(axis),
        ),
        out_specs=(PartitionSpec(None, axis), PartitionSpec(axis)),
        check_vma=False,  # as `rules.local` within it
    )
    numbers = jnp.arange(stages, dtype=jnp.int32)
    inputs = jax.tree.map(functools.partial(cut, dim=1), inputs)
    out, kept = run(numbers, cut(x_BTD), jax.tree.map(cut, rows), layers, inputs)
    return constrain(out.reshape(x_BTD.shape), "batch", "length", "activation"), kept


def _check(rows: int, count: int, stages: int) -> None:
    if count % stages:
        fits = -(-count // stages) * stages
        raise ValueError(
            f"{count} micro-batches are no multiple of stage={stages}, which divide them before "
            f"and behind the layers; use {fits}"
        )
    if rows % count or not rows:
        fits = [n for n in range(stages, rows + 1, stages) if rows % n == 0]
        fix = f"use one of {fits}" if fits else f"give it a multiple of {stages} rows"
        raise ValueError(
            f"{rows} rows of a data rank cannot be cut into {count} micro-batches; {fix}"
        )


def _on_stage(number, x, rows, layers, inputs, *, body_of, axis, stages):
    """One stage's part: its number [1], M / S of the micro-batches that enter [G, M / S, r, T, D],
    all rows, its layers and their inputs -> M / S of those that leave, and its layers' outputs."""
    stage, last, groups = number[0], stages - 1, x.shape[0]
    with divided(axis):
        entering = _by_micro_batch(_to_first(x, axis, stages))
        count = len(entering)
        nothing = jnp.zeros((last, *entering.shape[1:]), entering.dtype)
        ticks = jnp.arange(count + last, dtype=jnp.int32)

        def tick(came, now):
            time, entered = now
            # idle ticks compute too, on whatever rows: nobody reads what comes of it
            index = jnp.clip(time - stage, 0, count - 1)
            h = jnp.where(stage == 0, entered, came)
            of_layers = layers, _rows_of(inputs, index, dim=1)
            h, kept = jax.lax.scan(body_of(_rows_of(rows, index)), h, of_layers)
            onward = [(s, s + 1) for s in range(last)]
            return jax.lax.ppermute(h, axis, onward), (h, kept)

        each = ticks, jnp.concatenate([entering, nothing])
        _, (left, kept) = jax.lax.scan(tick, jnp.zeros_like(entering[0]), each)
        # stage s is idle in its first s ticks and in its last S - 1 - s
        kept = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, stage, count).sum(0), kept)
        left = _from_last(left[last:], stage, axis, stages)
    left = left.reshape(len(left), groups, -1, *left.shape[2:])
    return left.swapaxes(0, 1), kept


# Rows go in and out by permutations, which add nothing up: only stages that need them get them, and
# XLA:CPU has no sums in bfloat16 over an axis of a shard_map that leaves others to it.
def _to_first(x: jax.Array, axis: str, stages: int) -> jax.Array:
    """[G, M / S, ...] of each stage -> [G, M, ...] of the first one; the others' are of no use."""
    come = [jax.lax.ppermute(x, axis, [(s, 0)]) for s in range(1, stages)]
    return jnp.concatenate([x, *come], axis=1)


def _from_last(x: jax.Array, stage: jax.Array, axis: str, stages: int) -> jax.Array:
    """[M, ...] of the last stage -> [M / S, ...] of each one, whose number is `stage`."""
    *shares, own = jnp.split(x, stages)
    # zeros come to all stages but the one that is meant
    gone = [jax.lax.ppermute(share, axis, [(stages - 1, s)]) for s, share in enumerate(shares)]
    return jnp.where(stage == stages - 1, own, sum(gone))


def _by_micro_batch(x: jax.Array) -> jax.Array:
    """[G, M, r, ...] -> [M, G r, ...], groups divided over the devices as they were."""
    x = x.swapaxes(0, 1)
    x = x.reshape(len(x), -1, *x.shape[3:])
    return constrain(x, "length", "batch", *["length"] * (x.ndim - 2))


def _rows_of(rows: Any, index: jax.Array, dim: int = 0) -> Any:
    """Micro-batch `index` of arrays [..., G, M, r, ...], of which G is `dim`: [..., G r, ...]."""

    def one(x):
        name = "parts" if x.shape[dim] == width("parts") else "rows"
        part = jax.lax.dynamic_index_in_dim(x, index, axis=dim + 1, keepdims=False)
        part = part.reshape(*x.shape[:dim], -1, *part.shape[dim + 2 :])
        return constrain(part, *["layers"] * dim, name, *["length"] * (part.ndim - dim - 1))

    return jax.tree.map(one, rows)
