"""Pipeline parallelism: layers divided over pipeline ranks, micro-batches passed between them.

B rows or context shards of rows, T tokens of each, D hidden; L layers, S pipeline ranks (the mesh
axis `pipeline`), r rounds, M micro-batches. G row groups: the rows of one data rank, or of one
context shard there (context_parallel.py); R rows of a group in a micro-batch, B = G M R.

The layers are r S layer groups of L / (r S); rank g mod S runs group g in round g // S. At tick t
rank s works on item t - s, a micro-batch in one of its rounds, and passes the result to the next
rank, the last rank to the first. A pass takes r M + S - 1 ticks. Each rank is idle in S - 1 of
them, the bubble. The backward pass is the derivative of the loop: the same schedule in reverse.

One round is GPipe's schedule (Huang et al. 2019, arxiv.org/abs/1811.06965). With several rounds the
bubble is smaller, as a tick has 1 / r of the layers. Their order is that of Narayanan et al. 2021
(sec. 2.2, arxiv.org/abs/2104.04473): S micro-batches go through all their rounds, then the next S.
A micro-batch that returns to the first rank is worked on in that very tick, so nothing waits
between rounds. Layers are stored in order, and are brought to the ranks that run them at the start
of every pass (circular_pipeline.py).

Before the first layer and after the last one pipeline ranks divide the rows, as data ranks do: each
has M / S of the M micro-batches. A rank is a program of its own, in which `pipeline` is no longer
an axis. Within it, the other axes of the mesh are used as without a pipeline.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from distflow_jax.parallel.circular_pipeline import (
    Body,
    CircularPipeline,
    assign,
    collect,
    layer_slice,
    rounds,
    scan_layer_slice,
)
from distflow_jax.parallel.rules import active_mesh, constrain, divided, mesh_axes, width


def bubble_share(ranks: int, microbatches: int, repeats: int = 1) -> float:
    """Share of its time in which a pipeline rank is idle, (S - 1) / (r M + S - 1)."""
    return (ranks - 1) / (repeats * microbatches + ranks - 1)


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
    """Scans the layers, through the pipeline ranks of the active mesh where it has any.

    Equals `jax.lax.scan(remat(body_of(rows)), x, (layers, inputs))`, except that further outputs of
    a layer are summed over the micro-batches in a pipeline: they must be sums over rows.

    Args:
      body_of: makes the body of the scan for some of the rows.
      x_BTD: the input of the first layer.
      rows: pytree of arrays with rows in front, [B, ...], or with one entry for all context shards
        of a row; a micro-batch is passed its own.
      layers: pytree of arrays with layers in front, which pipeline ranks divide.
      inputs: pytree of arrays that differ by layer and row, [L, ...]; in a pipeline [L, B, ...].
      remat: wraps a body so that its gradient computes some of it again (models/remat.py). With
        several rounds, one that is not jax.checkpoint's stores the weights of the layer in every
        tick.
      microbatches: M, a multiple of S that divides the rows of a data rank; 0: S.
      repeats: r, divides the layers of a pipeline rank; ignored without a pipeline.

    Raises ValueError if M or r does not fit.
    """
    ranks = width("layers")
    if ranks == 1:
        return jax.lax.scan(remat(body_of(rows)), x_BTD, (layers, inputs))
    (axis,) = mesh_axes("layers")
    count = microbatches or ranks
    of_group = x_BTD.shape[0] // width("shards")
    _check(of_group, count, ranks)
    check_repeats(repeats, ranks, len(jax.tree.leaves(layers)[0]))

    def cut(x, dim=0):  # [..., G M R, ...] -> [..., G, M, R, ...]
        assert hasattr(x, "shape"), f"{x} is not divided with its rows: use jax.tree_util.Partial"
        before, size, behind = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
        assert size % of_group == 0, (x.shape, of_group)
        return x.reshape(*before, size // of_group, count, -1, *behind)

    pipeline = CircularPipeline(axis, ranks, repeats)
    run = jax.shard_map(
        functools.partial(_run_rank, body_of=body_of, remat=remat, pipeline=pipeline),
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
        check_vma=False,  # as for `rules.local`, which is called within
    )
    numbers = jnp.arange(ranks, dtype=jnp.int32)
    inputs = jax.tree.map(functools.partial(cut, dim=1), inputs)
    out, kept = run(numbers, cut(x_BTD), jax.tree.map(cut, rows), layers, inputs)
    return constrain(out.reshape(x_BTD.shape), "batch", "stream", "activation"), kept


def check_pipeline_repeats(repeats: int, pipelines: Sequence[int], layers: int) -> None:
    """Raises ValueError unless training.pipeline_repeats fits all training meshes."""
    if repeats > 1 and max(pipelines) == 1:
        raise ValueError(
            f"training.pipeline_repeats={repeats} needs a pipeline, and mesh.pipeline is 1; "
            "use 1, or mesh.pipeline above 1"
        )
    for count in pipelines:
        if count > 1:
            check_repeats(repeats, count, layers)


def check_repeats(repeats: int, ranks: int, layers: int) -> None:
    """Raises ValueError unless `repeats` divides the layers of each pipeline rank."""
    of_rank = layers // ranks
    if of_rank % repeats:
        fits = [n for n in range(1, of_rank + 1) if of_rank % n == 0]
        raise ValueError(
            f"training.pipeline_repeats={repeats} does not divide the {of_rank} layers of each "
            f"pipeline rank ({layers} over pipeline={ranks}); use one of {fits}"
        )


def _check(rows: int, count: int, ranks: int) -> None:
    if count % ranks:
        fits = -(-count // ranks) * ranks
        raise ValueError(
            f"{count} micro-batches are not a multiple of pipeline={ranks}, whose ranks divide "
            f"them before the first and after the last layer; use {fits}"
        )
    if rows % count or not rows:
        fits = [n for n in range(ranks, rows + 1, ranks) if rows % n == 0]
        fix = f"use one of {fits}" if fits else f"give each data rank a multiple of {ranks} rows"
        raise ValueError(
            f"{rows} rows of a data rank cannot be divided into {count} micro-batches; {fix}"
        )


@dataclasses.dataclass(frozen=True)
class _RankWork:
    """Everything that a pipeline rank reads in its ticks."""

    body_of: Callable[[Any], Body]
    remat: Callable[[Body], Body]
    pipeline: CircularPipeline
    rank: jax.Array  # its number, a scalar
    entering: jax.Array  # [M, G R, T, D], the micro-batches; meaningful on the first rank
    rows: Any  # [G, M, R, ...]
    layers: Any  # [L / S, ...], in the order of permutations
    inputs: Any  # of these layers, [L / S, G, M, R, ...]
    firsts: jax.Array  # int32 [r, S]: the first layer of each round, by round and rank

    @property
    def items(self) -> int:
        """Micro-batches times rounds, r M: the ticks in which a rank is not idle."""
        return self.pipeline.repeats * len(self.entering)

    def tick(self, state: Any, time: jax.Array) -> tuple[Any, Any]:
        """The body of the scan over ticks: runs one layer group on one micro-batch.

        `state`: (arrived [G R, T, D], the previous rank's result; left [M, G R, T, D], the last
        result of each micro-batch). Returns the next state and the layers' further outputs.
        """
        arrived, left = state
        ranks, repeats = self.pipeline.ranks, self.pipeline.repeats
        # idle ticks compute too, on arbitrary rows; their results are not used
        item = jnp.clip(time - self.rank, 0, self.items - 1)
        turn, index = _round_and_micro_batch(item, ranks, repeats)
        entered = jax.lax.dynamic_index_in_dim(self.entering, index, keepdims=False)
        h = jnp.where((self.rank == 0) & (turn == 0), entered, arrived)
        body, first = self.body_of(_rows_of(self.rows, index)), self.firsts[turn, self.rank]
        size = len(jax.tree.leaves(self.layers)[0]) // repeats
        inputs = _rows_of(layer_slice(self.inputs, first, size), index, dim=1)
        if repeats == 1:
            h, kept = jax.lax.scan(self.remat(body), h, (self.layers, inputs))
        else:
            h, kept = scan_layer_slice(body, self.remat, h, self.layers, inputs, first, size)
        # the result of a micro-batch's last round overwrites those of the rounds before
        left = jax.lax.dynamic_update_index_in_dim(left, h, index, 0)
        onward = [(s, (s + 1) % ranks) for s in range(ranks if repeats > 1 else ranks - 1)]
        return (jax.lax.ppermute(h, self.pipeline.axis, onward), left), kept


def _run_rank(number, x, rows, layers, inputs, *, body_of, remat, pipeline):
    """The program of one pipeline rank, the body of a shard_map over the pipeline axis.

    Args:
      number: the rank, int32 [1].
      x: the rank's share of the micro-batches before the first layer, [G, M / S, R, T, D].
      rows: of all micro-batches, [G, M, R, ...].
      layers: those that the rank stores, [L / S, ...].
      inputs: of these layers, [L / S, G, M, R, ...].
      body_of, remat: see scan_layers.
      pipeline: its shape.

    Returns:
      (the rank's share of the micro-batches after the last layer, [G, M / S, R, T, D]; further
      outputs of its layers, summed over micro-batches, [L / S, ...]).
    """
    rank, groups = number[0], x.shape[0]
    ranks, repeats = pipeline.ranks, pipeline.repeats
    with divided(pipeline.axis):
        entering = _by_micro_batch(_to_first(x, pipeline))
        layers, inputs = assign((layers, inputs), rank, pipeline)
        size = len(jax.tree.leaves(layers)[0]) // repeats  # layers of a round
        firsts = jnp.asarray(size * np.argsort(rounds(ranks, repeats), axis=0).astype(np.int32))
        work = _RankWork(body_of, remat, pipeline, rank, entering, rows, layers, inputs, firsts)
        ticks = jnp.arange(work.items + ranks - 1, dtype=jnp.int32)
        nothing = jnp.zeros_like(entering[0]), jnp.zeros_like(entering)
        (_, left), kept = jax.lax.scan(work.tick, nothing, ticks)

        def by_round(x):  # rank s is idle in its first s ticks and in its last S - 1 - s
            x = jax.lax.dynamic_slice_in_dim(x, rank, work.items)
            return x.reshape(-1, repeats, ranks, *x.shape[1:]).sum((0, 2))

        kept = collect(jax.tree.map(by_round, kept), rank, pipeline)
        left = _from_last(left, rank, pipeline)
    left = left.reshape(len(left), groups, -1, *left.shape[2:])
    return left.swapaxes(0, 1), kept


def _round_and_micro_batch(
    item: jax.Array, ranks: int, repeats: int
) -> tuple[jax.Array, jax.Array]:
    """(round, micro-batch) of an item: S micro-batches go through r rounds, then the next S."""
    block, within = item // (repeats * ranks), item % ranks
    return item // ranks % repeats, block * ranks + within


# Rows enter and leave by permutations, which add nothing up: only ranks that need rows receive
# them, and XLA:CPU has no sums in bfloat16 over an axis of a shard_map that leaves other axes to
# the compiler.
def _to_first(x: jax.Array, pipeline: CircularPipeline) -> jax.Array:
    """[G, M / S, ...] of each rank -> [G, M, ...] on the first; the others' results are unused."""
    arrived = [jax.lax.ppermute(x, pipeline.axis, [(s, 0)]) for s in range(1, pipeline.ranks)]
    return jnp.concatenate([x, *arrived], axis=1)


def _from_last(x: jax.Array, rank: jax.Array, pipeline: CircularPipeline) -> jax.Array:
    """[M, ...] of the last rank -> [M / S, ...] on each rank, of number `rank`."""
    axis, last = pipeline.axis, pipeline.ranks - 1
    *shares, own = jnp.split(x, pipeline.ranks)
    # all ranks but the receiver get zeros
    sent = [jax.lax.ppermute(share, axis, [(last, s)]) for s, share in enumerate(shares)]
    return jnp.where(rank == last, own, sum(sent))


def _by_micro_batch(x: jax.Array) -> jax.Array:
    """[G, M, R, ...] -> [M, G R, ...], groups divided over the devices as before."""
    x = x.swapaxes(0, 1)
    x = x.reshape(len(x), -1, *x.shape[3:])
    return constrain(x, "length", "batch", *["length"] * (x.ndim - 2))


def _rows_of(rows: Any, index: jax.Array, dim: int = 0) -> Any:
    """Micro-batch `index` of arrays [..., G, M, R, ...], with G at `dim`: [..., G R, ...]."""

    def one(x):
        name = "shards" if x.shape[dim] == width("shards") else "rows"
        taken = jax.lax.dynamic_index_in_dim(x, index, axis=dim + 1, keepdims=False)
        taken = taken.reshape(*x.shape[:dim], -1, *taken.shape[dim + 2 :])
        return constrain(taken, *["layers"] * dim, name, *["length"] * (taken.ndim - dim - 1))

    return jax.tree.map(one, rows)
