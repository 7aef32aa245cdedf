"""The critic's objective: squared error to the returns, with clipped values.

R rows, L tokens per row, S sequences per row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.aggregate import denominator, token_weights
from distflow_jax.algorithms.masked import masked_sum
from distflow_jax.algorithms.packed import per_token
from distflow_jax.algorithms.value import value_loss
from distflow_jax.batch import Rows
from distflow_jax.config.algorithm_config import ValueConfig
from distflow_jax.models.decoder_config import ScalarModel
from distflow_jax.training.forward import ForwardConfig, response_values
from distflow_jax.training.objective import Metrics, Objective, at_least_one


class ValueBatch(NamedTuple):
    """Fields of the critic's loss; those of rows are [R, L] and [R, S], the others [R, L]."""

    rows: Rows
    returns: jax.Array  # the targets
    value: jax.Array  # the critic's prediction before the step's updates


class ValueCounts(NamedTuple):
    """Global counts of rows, int32 scalars."""

    tokens: jax.Array  # masked-in response tokens
    sequences: jax.Array  # with at least one such token


class ValueDenominators(NamedTuple):
    """Global counts of one optimizer step, float32 scalars."""

    loss: jax.Array  # of the aggregation
    tokens: jax.Array  # masked-in response tokens


def value_objective(
    model: ScalarModel, config: ValueConfig, forward: ForwardConfig, *, max_response: int
) -> Objective:
    """The objective that `config` configures; `max_response` is in tokens."""
    return Objective(
        "critic",
        model,
        prepare,
        functools.partial(denominators_of, config=config, max_response=max_response),
        functools.partial(evaluate, model=model, config=config, forward=forward),
    )


def prepare(batch: ValueBatch, before: Any = None) -> tuple[ValueBatch, ValueCounts]:
    """The unchanged batch, and the counts of its rows."""
    tokens = batch.rows.response_mask.sum(dtype=jnp.int32)
    return batch, ValueCounts(tokens, (batch.rows.length > 0).sum(dtype=jnp.int32))


def denominators_of(
    counts: ValueCounts, *, config: ValueConfig, max_response: int
) -> ValueDenominators:
    """Denominators of an optimizer step with these counts."""
    tokens, sequences = counts
    norm = float(max_response)
    total = denominator(config.aggregation, tokens, sequences, norm=norm, budget=0)
    return ValueDenominators(*at_least_one((total, tokens)))


def evaluate(
    params: Any,
    batch: ValueBatch,
    denominators: ValueDenominators,
    temperature: jax.Array,
    *,
    model: ScalarModel,
    config: ValueConfig,
    forward: ForwardConfig,
) -> tuple[jax.Array, Metrics]:
    """Contribution of a micro-batch to the loss, a scalar, and to the metrics.

    `temperature` is not used.
    """
    rows, mask = batch.rows, batch.rows.response_mask
    value = response_values(params, model, rows, forward)
    per_token_loss = value_loss(value, batch.value, batch.returns, mask, clip=config.clip)
    weight = token_weights(config.aggregation, mask, per_token(rows.length, rows.segment))
    loss = masked_sum(per_token_loss.loss * weight, mask) / denominators.loss
    sums = {
        "critic/vf_loss": loss,
        "critic/vf_clipfrac": masked_sum(per_token_loss.clipped, mask) / denominators.tokens,
        "critic/vpred_mean": masked_sum(value, mask) / denominators.tokens,
    }
    return loss, jax.lax.stop_gradient({"sum": sums, "max": {}})
