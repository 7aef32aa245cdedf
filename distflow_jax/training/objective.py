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
class Preview:
    """A forward pass over an optimizer step before its first gradient, for choices over all of it.

    `predict(params, micro_batch, temperature)` returns log-probs [R, L] of the model as it stands;
    `place(batch, logp)` the batch with those of all rows [R, L]. `known(batch)` are log-probs
    [R, L] that the first update of a batch can take in place of a pass; None: there are none.
    """

    predict: Callable[[Any, Any, jax.Array], jax.Array]
    place: Callable[[Any, jax.Array], Any]
    known: Callable[[Any], jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss that is a sum over rows.

    `prepare(batch)` gets the rows of a whole optimizer step. It returns the batch, with fields that
    depend on the whole step, and the step's denominators: global counts, equal on all devices.
    `evaluate(params, micro_batch, denominators, temperature)` returns the micro-batch's
    contribution to the loss and to the metrics. The sum of all contributions does not depend on the
    division into micro-batches. `finish` turns the summed metrics, which may be arrays, into
    numbers. With a `preview`, `prepare` gets the batch that it has placed log-probs in.
    """

    name: str  # prefix of its metrics: actor, critic, reward_model
    model: Network
    prepare: Callable[[Any], tuple[Any, Any]]
    evaluate: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, Metrics]]
    finish: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = dict
    preview: Preview | None = None
