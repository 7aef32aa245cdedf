"""Interface between the update and the objectives."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

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


class Prepare(Protocol):
    """`Objective.prepare`."""

    def __call__(self, batch: Any, before: Any = None) -> tuple[Any, Any]:
        """(batch, counts) of rows whose step had the counts `before` in earlier partial batches."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss that is a sum over rows.

    `prepare(batch, before)` gets the rows of a whole optimizer step, or of a partial batch: a part
    of it. It returns the batch, with fields that depend on all of these rows, and their share of
    the step's counts, a pytree of numbers equal on all devices; the shares of all partial batches
    add up to the step's. `before` has the sum of the shares of earlier partial batches; None: there
    is none. `denominators(counts)` are those of a step with these counts, a pytree of scalars.
    `evaluate(params, micro_batch, denominators, temperature)` returns the micro-batch's
    contribution to the loss and to the metrics. The sum of all contributions does not depend on the
    division into micro-batches. Where the denominators are not known yet it gets divisors, and
    returns numerators, kept apart by the denominator that they belong to (quotient.py). So it does
    nothing with a denominator but divide by it, and only what is linear with the result. `finish`
    turns the summed metrics, which may be arrays, into numbers. With a `preview`, `prepare` gets
    the batch that it has placed log-probs in.
    """

    name: str  # prefix of its metrics: actor, critic, reward_model
    model: Network
    prepare: Prepare
    denominators: Callable[[Any], Any]
    evaluate: Callable[[Any, Any, Any, jax.Array], tuple[Any, Metrics]]
    finish: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = dict
    preview: Preview | None = None
    waits: str = ""  # why its steps cannot be cut into partial batches, a sentence; "": they can

    def whole(self, batch: Any) -> tuple[Any, Any]:
        """The batch of an optimizer step, rows [R, ...], as `evaluate` takes it; denominators."""
        batch, counts = self.prepare(batch)
        return batch, self.denominators(counts)


def at_least_one(counts: Any) -> Any:
    """A pytree of counts, scalars, as float32 denominators: a step without any divides by 1."""
    return jax.tree.map(lambda x: jnp.maximum(jnp.asarray(x, jnp.float32), 1.0), counts)
