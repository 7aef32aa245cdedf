"""Metrics of a batch from those of its partial batches, for nodes that run on each partial batch by
itself.

Means are over tokens or over sequences, so partial batches weigh by their numbers of these. Metrics
of an update are not among them: an optimizer step divides its sums by itself.

K mini-batches, R rows, L tokens per row, S sequences per row.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.packed import counted
from distflow_jax.batch import Rows

# beginnings of names, behind a node's prefix, of means over response tokens; others are means over
# sequences
_OF_TOKENS = ("critic/advantages/", "critic/returns/", "critic/values/")


class PartialBatchSize(NamedTuple):
    """Numbers of what means are taken over, int32 scalars on devices, or numbers on the host."""

    tokens: jax.Array | int  # response tokens under the mask
    sequences: jax.Array | int  # with at least one such token


def partial_batch_size(rows: Rows) -> PartialBatchSize:
    """The size of a partial batch's rows, fields [K, R, L] and [K, R, S]."""
    return PartialBatchSize(
        rows.response_mask.sum(dtype=jnp.int32), counted(rows).sum(dtype=jnp.int32)
    )


def merged_metrics(
    partial_batches: Sequence[Mapping[str, float]],
    sizes: Sequence[PartialBatchSize],
    prefix: str = "",
) -> dict[str, float]:
    """The metrics of a node over a batch, from those over each partial batch, on the host.

    `sizes` are those of the partial batches, `prefix` the node's in front of the names. Partial
    batches without sequences count for nothing, whatever their metrics say.
    """
    filled = [
        (w, size) for w, size in zip(partial_batches, sizes, strict=True) if int(size.sequences)
    ]
    if not filled:
        return dict(partial_batches[0]) if partial_batches else {}
    return {name: _merged(_kind(name, prefix), name, filled) for name in filled[0][0]}


def _kind(name: str, prefix: str) -> str:
    """A metric's name without a node's prefix; a node may be called as a name begins: critic."""
    return name if name.startswith(_OF_TOKENS) else name.removeprefix(prefix)


def _merged(
    kind: str, name: str, filled: Sequence[tuple[Mapping[str, float], PartialBatchSize]]
) -> float:
    values = [float(metrics[name]) for metrics, _ in filled]
    if kind.endswith(("/max", "_max")):
        return max(values)
    if kind.endswith(("/min", "_min")):
        return min(values)
    weights = [
        int(size.tokens if kind.startswith(_OF_TOKENS) else size.sequences) for _, size in filled
    ]
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
