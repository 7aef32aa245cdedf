"""Supervised fine-tuning objective: the negative log-likelihood of the response tokens.

R rows, L tokens per row, S sequences per row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.masked import masked_sum
from distflow_jax.batch import Rows
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.training.forward import ForwardConfig, response_logp
from distflow_jax.training.objective import Metrics, Objective, at_least_one


class SftBatch(NamedTuple):
    """Fields of the loss; those of rows are [R, L] and [R, S]."""

    rows: Rows


def sft_objective(model: DecoderConfig, forward: ForwardConfig) -> Objective:
    """The mean of -logp over all response tokens of a step."""
    return Objective(
        "actor",
        model,
        count_tokens,
        at_least_one,
        functools.partial(evaluate, model=model, forward=forward),
    )


def count_tokens(batch: SftBatch, before: Any = None) -> tuple[SftBatch, jax.Array]:
    """The unchanged batch, and its number of response tokens, int32."""
    return batch, batch.rows.response_mask.sum(dtype=jnp.int32)


def evaluate(
    params: Any,
    batch: SftBatch,
    num_tokens: jax.Array,
    temperature: jax.Array,
    *,
    model: DecoderConfig,
    forward: ForwardConfig,
) -> tuple[jax.Array, Metrics]:
    """Contribution of a micro-batch to the loss, a scalar, and to the metrics."""
    mask = batch.rows.response_mask
    logp, entropy = response_logp(params, model, batch.rows, temperature, forward)
    loss = -masked_sum(logp, mask) / num_tokens
    sums = {"actor/nll": loss, "actor/entropy": masked_sum(entropy, mask) / num_tokens}
    return loss, jax.lax.stop_gradient({"sum": sums, "max": {}})
