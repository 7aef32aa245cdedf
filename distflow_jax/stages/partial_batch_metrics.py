"""Metrics of a batch from those of its partial batches, for nodes that run on each partial batch by
itself.

A mean weighs by the number of what it is over, which its stage measures beside it under a name with
layout.WEIGHT; without that, by sequences. Metrics of an update are not among them: an optimizer
step divides its sums by itself.

K mini-batches, R rows, L tokens per row, S sequences per row.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.packed import counted
from distflow_jax.batch import Rows
from distflow_jax.dag.plan_walker import COUNTS
from distflow_jax.layout import WEIGHT


def num_sequences(rows: Rows) -> jax.Array:
    """Sequences with response tokens under the mask, int32 scalar, of rows with fields [K, R, L]
    and [K, R, S]."""
    return counted(rows).sum(dtype=jnp.int32)


def merged_metrics(
    partial_batches: Sequence[Mapping[str, float]], sequences: Sequence[int]
) -> dict[str, float]:
    """The metrics of nodes over a batch, from those over each partial batch, on the host.

    `sequences` are the numbers of those in the partial batches. Partial batches without any, or in
    which a mean is over nothing, count for nothing, whatever their metrics say.
    """
    merged = {}
    for name in dict.fromkeys(name for metrics in partial_batches for name in metrics):
        found = [
            (float(metrics[name]), float(metrics.get(name + WEIGHT, count)))
            for metrics, count in zip(partial_batches, sequences, strict=True)
            if name in metrics
        ]
        merged[name] = _merged(name, found)
    return merged


def _merged(name: str, found: Sequence[tuple[float, float]]) -> float:
    """A metric of that name, from (value, weight) in each partial batch that has it."""
    if name.endswith((WEIGHT, *COUNTS)):
        return math.fsum(value for value, _ in found)
    filled = [one for one in found if one[1]]
    if not filled:
        return found[0][0]
    if name.endswith(("/max", "_max")):
        return max(value for value, _ in filled)
    if name.endswith(("/min", "_min")):
        return min(value for value, _ in filled)
    return math.fsum(x * weight for x, weight in filled) / math.fsum(w for _, w in filled)
