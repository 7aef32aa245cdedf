"""Objectives over pairs of responses: DPO and IPO against a frozen reference, ORPO without one, and
reward models, which should score the chosen response above the rejected one.

A pair is a group with sample 0 as the chosen and sample 1 as the rejected response, both in one
row. R rows, L tokens per row, S sequences per row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.masked import masked_sum
from distflow_jax.algorithms.packed import per_sequence, sequence_mean
from distflow_jax.algorithms.preference import PREFERENCE_LOSSES, pairs, partner, reward_model
from distflow_jax.batch import Rows
from distflow_jax.config.algorithm_config import PreferenceConfig, RewardModelConfig
from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel
from distflow_jax.training.forward import ForwardConfig, response_logp, sequence_scores
from distflow_jax.training.objective import Metrics, Objective, at_least_one


class PreferenceBatch(NamedTuple):
    """Fields of the preference loss; those of rows are [R, L] and [R, S]."""

    rows: Rows
    ref_logp: jax.Array | None = None  # [R, L], of the reference; None: the loss reads none


class PairCount(NamedTuple):
    """Counts of one optimizer step, scalars: int32, as denominators float32."""

    pairs: jax.Array
    sequences: jax.Array


def preference_objective(
    model: DecoderConfig, config: PreferenceConfig, forward: ForwardConfig
) -> Objective:
    """The mean over all pairs of a step of the loss that `config` selects."""
    return Objective(
        "actor",
        model,
        count_pairs,
        at_least_one,
        functools.partial(evaluate_preference, model=model, config=config, forward=forward),
    )


def count_pairs(batch: Any, before: Any = None) -> tuple[Any, PairCount]:
    """The unchanged batch, and the number of pairs and sequences in its rows."""
    found = pairs(batch.rows).sum(dtype=jnp.int32)
    return batch, PairCount(found, batch.rows.valid.sum(dtype=jnp.int32))


def evaluate_preference(
    params: Any,
    batch: PreferenceBatch,
    count: PairCount,
    temperature: jax.Array,
    *,
    model: DecoderConfig,
    config: PreferenceConfig,
    forward: ForwardConfig,
) -> tuple[jax.Array, Metrics]:
    """Contribution of a micro-batch to the loss, a scalar, and to the metrics, with TRL's names."""
    rows = batch.rows
    token_logp, _ = response_logp(params, model, rows, temperature, forward)
    logp = per_sequence(token_logp, rows)
    if batch.ref_logp is None:
        reward = sequence_mean(token_logp, rows)
    else:
        reward = logp - per_sequence(batch.ref_logp, rows)
    paired = pairs(rows)
    has_partner, other = paired.any(axis=-1), partner(reward, paired)
    of_pairs = PREFERENCE_LOSSES[config.loss](reward, other, beta=config.beta)

    def mean(x):
        return masked_sum(x, has_partner) / count.pairs

    loss = mean(of_pairs.loss)
    sums = {name: mean(x) for name, x in of_pairs.metrics.items()} | {
        "rewards/chosen": config.beta * mean(reward),
        "rewards/rejected": config.beta * mean(other),
        "rewards/margins": config.beta * mean(reward - other),
        "rewards/accuracies": mean((reward > other).astype(jnp.float32)),
        "logps/chosen": mean(logp),
        "logps/rejected": mean(partner(logp, paired)),
        "preference/unpaired_fraction": unpaired(paired, rows) / count.sequences,
    }
    return loss, jax.lax.stop_gradient({"sum": sums, "max": {}})


def unpaired(paired: jax.Array, rows: Rows) -> jax.Array:
    """Number of sequences outside all pairs [R, S, S], which do not train the model; float32."""
    alone = rows.valid & ~(paired.any(axis=-1) | paired.any(axis=-2))
    return alone.sum(dtype=jnp.int32).astype(jnp.float32)


class RewardModelBatch(NamedTuple):
    """Fields of a reward model's loss; those of rows are [R, L] and [R, S]."""

    rows: Rows


def reward_model_objective(
    model: ScalarModel, config: RewardModelConfig, forward: ForwardConfig
) -> Objective:
    """The mean of the ranking loss over all pairs of a step."""
    return Objective(
        "reward_model",
        model,
        count_pairs,
        at_least_one,
        functools.partial(evaluate_reward_model, model=model, config=config, forward=forward),
    )


def evaluate_reward_model(
    params: Any,
    batch: RewardModelBatch,
    count: PairCount,
    temperature: jax.Array,
    *,
    model: ScalarModel,
    config: RewardModelConfig,
    forward: ForwardConfig,
) -> tuple[jax.Array, Metrics]:
    """Contribution of a micro-batch to the loss, a scalar, and to the metrics.

    `temperature` is not used.
    """
    rows = batch.rows
    score = sequence_scores(params, model, rows, forward)
    paired = pairs(rows)
    has_partner, other = paired.any(axis=-1), partner(score, paired)
    per_pair = reward_model(score, other, margin=config.margin, center_coef=config.center_coef)

    def mean(x):
        return masked_sum(x, has_partner) / count.pairs

    loss = mean(per_pair)
    sums = {
        "reward_model/score_chosen": mean(score),
        "reward_model/score_rejected": mean(other),
        "reward_model/score_margin": mean(score - other),
        "reward_model/accuracy": mean((score > other).astype(jnp.float32)),
        "preference/unpaired_fraction": unpaired(paired, rows) / count.sequences,
    }
    return loss, jax.lax.stop_gradient({"sum": sums, "max": {}})
