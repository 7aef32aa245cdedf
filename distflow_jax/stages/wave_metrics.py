"""Metrics of a batch from those of its waves, for nodes that run on each wave by itself.

Means are over tokens or over sequences, so waves weigh by their numbers of these. Metrics of an
update are not among them: an optimizer step divides its sums by itself.

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


class WaveSize(NamedTuple):
    """Numbers of what means are taken over, int32 scalars on devices, or numbers on the host."""

    tokens: jax.Array | int  # response tokens under the mask
    sequences: jax.Array | int  # with at least one such token


def wave_size(rows: Rows) -> WaveSize:
    """The size of a wave's rows, fields [K, R, L] and [K, R, S]."""
    return WaveSize(rows.response_mask.sum(dtype=jnp.int32), counted(rows).sum(dtype=jnp.int32))


def merged_metrics(
    waves: Sequence[Mapping[str, float]], sizes: Sequence[WaveSize], prefix: str = ""
) -> dict[str, float]:
    """The metrics of a node over a batch, from those over each wave, on the host.

    `sizes` are those of the waves, `prefix` the node's in front of the names. Waves without
    sequences count for nothing, whatever their metrics say.
    """
    filled = [(w, size) for w, size in zip(waves, sizes, strict=True) if int(size.sequences)]
    if not filled:
        return dict(waves[0]) if waves else {}
    return {name: _merged(_kind(name, prefix), name, filled) for name in filled[0][0]}


def _kind(name: str, prefix: str) -> str:
    """A metric's name without a node's prefix; a node may be called as a name begins: critic."""
    return name if name.startswith(_OF_TOKENS) else name.removeprefix(prefix)


def _merged(kind: str, name: str, filled: Sequence[tuple[Mapping[str, float], WaveSize]]) -> float:
    values = [float(metrics[name]) for metrics, _ in filled]
    if kind.endswith(("/max", "_max")):
        return max(values)
    if kind.endswith(("/min", "_min")):
        return min(values)
    weights = [
        int(size.tokens if kind.startswith(_OF_TOKENS) else size.sequences) for _, size in filled
    ]
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
