"""Optimizer steps cut into partial batches, for tests that compare them with the same steps at
once.

G groups, R rows, L tokens per row, S sequences per row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.algorithms.packed import per_token
from distflow_jax.training.quotient import divisors_of
from distflow_jax.training.update import Accumulators, divide, empty, gradient_of
from support.ragged import QUICK

# settings of a run in partial batches, on eight devices of one process
APART = (
    "mesh.devices=0:4",
    "mesh.roles={'ROLLOUT': {'devices': '4:8'}}",
    "stream.max_staleness=1",
    "algorithm.correction=token_tis",
    "stream.partial_batches=counter",
    "stream.partial_batch_prompts=4",
)


def cut(seed: int, groups: int, *, partial_batches: int, ordered: bool = False) -> list[np.ndarray]:
    """Masks [G] of the groups of each partial batch: each group in one, at random; some partial
    batches are empty.

    `ordered`: partial batches take the groups by their numbers.
    """
    partial_batch = np.random.default_rng(seed).integers(0, partial_batches, groups)
    partial_batch = np.sort(partial_batch) if ordered else partial_batch
    return [partial_batch == number for number in range(partial_batches)]


def rows_of_groups(rows, part_G):
    """The rows [..., L] and [..., S] with the groups of a part alone, where they lie."""
    member = jnp.asarray(part_G)[rows.group] & rows.valid
    return dataclasses.replace(
        rows,
        response_mask=per_token(member, rows.segment) & rows.response_mask,
        valid=member,
        length=jnp.where(member, rows.length, 0),
    )


def of_groups(batch, part_G):
    """The batch with the groups of a part alone, in the rows where they lie."""
    return batch._replace(rows=rows_of_groups(batch.rows, part_G))


def of_rows(batch, part_R):
    """The batch with some rows alone, as if the others were empty."""
    rows, part_R1 = batch.rows, jnp.asarray(part_R)[:, None]
    rows = dataclasses.replace(
        rows,
        segment=jnp.where(part_R1, rows.segment, 0),
        response_mask=rows.response_mask & part_R1,
        valid=rows.valid & part_R1,
        length=jnp.where(part_R1, rows.length, 0),
    )
    return batch._replace(rows=rows)


def step_in_partial_batches(objective):
    """(params, batch, masks of partial batches) -> (gradient, metrics) of the step, without a mesh.

    All rows of a partial batch are one micro-batch, and all partial batches run one program.
    """

    def gradient(params, counts, batch):
        divisors = divisors_of(jax.eval_shape(objective.denominators, counts))
        return gradient_of(params, divisors, jnp.float32(1), objective)(batch)

    @jax.jit
    def begin(params, batch):
        batch, counts = objective.prepare(batch)
        found = jax.eval_shape(gradient, params, counts, batch)
        return empty(Accumulators(*found, counts, jnp.bool_(False)))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def partial_batch(params, sums, batch, part_G):
        batch, counts = objective.prepare(of_groups(batch, part_G), sums.counts)
        found = gradient(params, counts, batch)
        return Accumulators(
            jax.tree.map(jnp.add, sums.gradients, found[0]),
            {
                "sum": jax.tree.map(jnp.add, sums.metrics["sum"], found[1]["sum"]),
                "max": jax.tree.map(jnp.maximum, sums.metrics["max"], found[1]["max"]),
            },
            jax.tree.map(jnp.add, sums.counts, counts),
            sums.valid | batch.rows.valid.any(),
        )

    def step(params, batch, parts):
        sums = begin(params, batch)
        for part_G in parts:
            sums = partial_batch(params, sums, batch, part_G)
        assert partial_batch._cache_size() == 1
        return jax.device_get(divide(sums, objective))

    return step
