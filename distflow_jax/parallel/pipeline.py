"""Pipeline parallelism: stages of devices, each with a part of the layers, and micro-batches of
rows that go through one stage after the other, once or several times.

B rows or parts of rows, T tokens of one, D hidden; L layers, S stages (the mesh axis `pipeline`), r
rounds, M micro-batches, G groups of rows: of a data rank, or of a part there (context.py); R rows
of a group in a micro-batch, B = G M R.

The layers are r S chunks of L / (r S), of which chunk g is stage g mod S's in round g // S. At tick
t stage s works on item t - s, a micro-batch in one of its rounds, and hands on what it made of it,
the last stage to the first one. After r M + S - 1 ticks all are through; of each stage's ticks
S - 1 are idle, the bubble. The backward pass is the same in reverse, by differentiating the loop.

One round is GPipe's schedule (Huang et al. 2019, arxiv.org/abs/1811.06965). Several make the bubble
smaller, as a tick has 1 / r of the layers, in the order of Narayanan et al. 2021 (sec. 2.2,
arxiv.org/abs/2104.04473): S micro-batches go all their rounds, then the next S. One that comes
back to the first stage has its turn there at that tick, and nothing waits between rounds. Layers
are dealt to their stages at the start of every pass (dealing.py), where they lie in order.

Before the first layer and behind the last one stages divide the rows, as data ranks do: of M
micro-batches each stage has M / S. A stage is its own program, in which `pipeline` is no axis any
more: what happens within it, over the other axes of the mesh, is as it is without stages.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from distflow_jax.parallel.circular_pipeline import Body, collect, deal, rounds, scan_some, some
from distflow_jax.parallel.rules import active_mesh, constrain, divided, mesh_axes, width


def bubble_share(stages: int, microbatches: int, repeats: int = 1) -> float:
    """The share of a stage's time in which it has nothing to do, (S - 1) / (r M + S - 1)."""
    return (stages - 1) / (repeats * microbatches + stages - 1)


def scan_layers(
    body_of: Callable[[Any], Body],
    x_BTD: jax.Array,
    rows: Any,
    layers: Any,
    inputs: Any = None,
    *,
    remat: Callable[[Body], Body] = lambda body: body,
    microbatches: int = 0,
    repeats: int = 1,
) -> tuple[jax.Array, Any]:
    """`jax.lax.scan(remat(body_of(rows)), x, (layers, inputs))`, through the stages where there are
    any.

    Args:
      body_of: makes the body of the scan for some of the rows.
      rows: pytree of arrays with rows in front, [B, ...], or [R, ...] where a row has several
        parts; those of a micro-batch go with it.
      layers: pytree of arrays with layers in front; stages divide them.
      inputs: pytree of arrays that differ by layer and row; with stages rows come second in them.
      remat: gives a body whose gradient computes some of it again (models/remat.py). With several
        rounds one that is not jax.checkpoint's keeps its layer's weights in every tick.
      microbatches: M, a multiple of S that divides the rows of a data rank; 0: S.
      repeats: r, divides the layers of a stage; no matter where there is but one stage.

    What layers give beside x is, with stages, added up over the micro-batches: it has to be a sum
    over rows. Raises ValueError where M or r does not fit.
    """
    stages = width("layers")
    if stages == 1:
        return jax.lax.scan(remat(body_of(rows)), x_BTD, (layers, inputs))
    (axis,) = mesh_axes("layers")
    count = microbatches or stages
    of_group = x_BTD.shape[0] // width("shards")
    _check(of_group, count, stages)
    check_repeats(repeats, stages, len(jax.tree.leaves(layers)[0]))

    def cut(x, dim=0):  # [..., G M R, ...] -> [..., G, M, R, ...]
        assert hasattr(x, "shape"), f"{x} does not go with its rows: use jax.tree_util.Partial"
        before, size, behind = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
        assert size % of_group == 0, (x.shape, of_group)
        return x.reshape(*before, size // of_group, count, -1, *behind)

    run = jax.shard_map(
        functools.partial(
            _on_stage, body_of=body_of, remat=remat, axis=axis, stages=stages, repeats=repeats
        ),
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
    return constrain(out.reshape(x_BTD.shape), "batch", "stream", "activation"), kept


def check_repeats(repeats: int, stages: int, layers: int) -> None:
    """ValueError unless each stage has as many layers in each of `repeats` rounds."""
    of_stage = layers // stages
    if of_stage % repeats:
        fits = [n for n in range(1, of_stage + 1) if of_stage % n == 0]
        raise ValueError(
            f"training.pipeline_repeats={repeats} does not divide the {of_stage} layers of each "
            f"stage ({layers} over pipeline={stages}); use one of {fits}"
        )


def _check(rows: int, count: int, stages: int) -> None:
    if count % stages:
        fits = -(-count // stages) * stages
        raise ValueError(
            f"{count} micro-batches are no multiple of pipeline={stages}, which divide them before "
            f"and behind the layers; use {fits}"
        )
    if rows % count or not rows:
        fits = [n for n in range(stages, rows + 1, stages) if rows % n == 0]
        fix = f"use one of {fits}" if fits else f"give it a multiple of {stages} rows"
        raise ValueError(
            f"{rows} rows of a data rank cannot be cut into {count} micro-batches; {fix}"
        )


def _on_stage(number, x, rows, layers, inputs, *, body_of, remat, axis, stages, repeats):
    """One stage's part: its number [1], M / S of the micro-batches that enter [G, M / S, R, T, D],
    all rows, its layers and their inputs -> M / S of those that leave, and its layers' outputs."""
    stage, groups = number[0], x.shape[0]
    with divided(axis):
        entering = _by_micro_batch(_to_first(x, axis, stages))
        items = repeats * len(entering)
        layers, inputs = deal((layers, inputs), stage, axis, stages, repeats)
        size = len(jax.tree.leaves(layers)[0]) // repeats  # layers of a round
        # where those of a round begin
        firsts = jnp.asarray(size * np.argsort(rounds(stages, repeats), axis=0).astype(np.int32))
        onward = [(s, (s + 1) % stages) for s in range(stages if repeats > 1 else stages - 1)]

        def tick(state, time):
            came, left = state
            # idle ticks compute too, on whatever rows: nobody reads what comes of it
            turn, index = _turn(jnp.clip(time - stage, 0, items - 1), stages, repeats)
            entered = jax.lax.dynamic_index_in_dim(entering, index, keepdims=False)
            h = jnp.where((stage == 0) & (turn == 0), entered, came)
            body, first = body_of(_rows_of(rows, index)), firsts[turn, stage]
            each = _rows_of(some(inputs, first, size), index, dim=1)
            if repeats == 1:
                h, kept = jax.lax.scan(remat(body), h, (layers, each))
            else:
                h, kept = scan_some(body, remat, h, layers, each, first, size)
            # what a micro-batch is after its last round is written last
            left = jax.lax.dynamic_update_index_in_dim(left, h, index, 0)
            return (jax.lax.ppermute(h, axis, onward), left), kept

        ticks = jnp.arange(items + stages - 1, dtype=jnp.int32)
        nothing = jnp.zeros_like(entering[0]), jnp.zeros_like(entering)
        (_, left), kept = jax.lax.scan(tick, nothing, ticks)

        def by_round(x):  # stage s is idle in its first s ticks and in its last S - 1 - s
            x = jax.lax.dynamic_slice_in_dim(x, stage, items)
            return x.reshape(-1, repeats, stages, *x.shape[1:]).sum((0, 2))

        kept = collect(jax.tree.map(by_round, kept), stage, axis, stages, repeats)
        left = _from_last(left, stage, axis, stages)
    left = left.reshape(len(left), groups, -1, *left.shape[2:])
    return left.swapaxes(0, 1), kept


def _turn(item: jax.Array, stages: int, repeats: int) -> tuple[jax.Array, jax.Array]:
    """(round, micro-batch) of an item: S micro-batches go r rounds, then the next S."""
    block, within = item // (repeats * stages), item % stages
    return item // stages % repeats, block * stages + within


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
    """[G, M, R, ...] -> [M, G R, ...], groups divided over the devices as they were."""
    x = x.swapaxes(0, 1)
    x = x.reshape(len(x), -1, *x.shape[3:])
    return constrain(x, "length", "batch", *["length"] * (x.ndim - 2))


def _rows_of(rows: Any, index: jax.Array, dim: int = 0) -> Any:
    """Micro-batch `index` of arrays [..., G, M, R, ...], of which G is `dim`: [..., G R, ...]."""

    def one(x):
        name = "shards" if x.shape[dim] == width("shards") else "rows"
        part = jax.lax.dynamic_index_in_dim(x, index, axis=dim + 1, keepdims=False)
        part = part.reshape(*x.shape[:dim], -1, *part.shape[dim + 2 :])
        return constrain(part, *["layers"] * dim, name, *["length"] * (part.ndim - dim - 1))

    return jax.tree.map(one, rows)
