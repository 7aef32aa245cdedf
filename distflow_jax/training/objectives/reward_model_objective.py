"""A reward model's objective: the chosen response of a pair should score above the rejected one.

Pairs as in preference_objective.py. R rows, L tokens per row, S sequences per row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.masked import masked_sum
from distflow_jax.algorithms.preference import RewardModelConfig, pairs, partner, reward_model
from distflow_jax.batch import Rows
from distflow_jax.models.decoder_config import ScalarModel
from distflow_jax.training.forward import ForwardConfig, sequence_scores
from distflow_jax.training.objective import Metrics, Objective, at_least_one
from distflow_jax.training.objectives.preference_objective import PairCount, count_pairs, unpaired


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
        functools.partial(evaluate, model=model, config=config, forward=forward),
    )


def evaluate(
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
