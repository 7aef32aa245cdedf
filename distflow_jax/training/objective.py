"""Interface between the update and the objectives."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from distflow_jax.batch import Rows
from distflow_jax.models.parameters import Network

# {"sum": {name: contribution}, "max": {name: value}}: sums are divided by the step's denominators,
# so the contributions of all micro-batches add up to the step's value
Metrics = dict[str, dict[str, jax.Array]]


class Batch(Protocol):
    """A pytree of arrays [R, ...] of a mini-batch, or [K, R, ...] of all mini-batches."""

    rows: Rows


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss that is a sum over rows.

    `prepare(batch)` gets the rows of a whole optimizer step. It returns the batch, with fields that
    depend on the whole step, and the step's denominators: global counts, equal on all devices.
    `evaluate(params, micro_batch, denominators, temperature)` returns the micro-batch's
    contribution to the loss and to the metrics. The sum of all contributions does not depend on the
    division into micro-batches. `finish` turns the summed metrics, which may be arrays, into
    numbers.
    """

    name: str  # prefix of its metrics: actor, critic, reward_model
    model: Network
    prepare: Callable[[Any], tuple[Any, Any]]
    evaluate: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, Metrics]]
    finish: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = dict
