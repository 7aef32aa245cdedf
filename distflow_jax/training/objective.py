"""The one form that update.py knows of whatever is trained."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from distflow_jax.batch import Rows
from distflow_jax.models.parameters import Network

# {"sum": {name: share}, "max": {name: value}}: sums have been divided by the step's denominators,
# so that adding them up over micro-batches gives the step's value
Metrics = dict[str, dict[str, jax.Array]]


class Batch(Protocol):
    """A pytree whose leaves have rows in front: [R, ...]; [K, R, ...] before a mini-batch is
    taken."""

    rows: Rows


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss that is a sum over rows.

    `prepare(batch)` sees a whole optimizer step at once, and gives the batch with what can only be
    decided there, and the step's denominators: global counts, on every device alike.
    `evaluate(params, micro-batch, denominators, temperature)` gives the micro-batch's share in the
    loss, and in the metrics. Whatever the split, shares add up to the same. `finish` makes a step's
    metrics, numbers all, of what the shares have added up to, which may be arrays.
    """

    name: str  # in front of its metrics: actor, critic, reward_model
    model: Network
    prepare: Callable[[Any], tuple[Any, Any]]
    evaluate: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, Metrics]]
    finish: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = dict
