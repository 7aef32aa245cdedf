"""Advantage: scores of whole groups, wherever their rows lie, to one number per token.

K mini-batches, R rows, L tokens per row, S sequences per row.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.algorithms.advantages import ESTIMATORS, Outcome
from distflow_jax.algorithms.kl import (
    KL_ESTIMATORS,
    adapted_coef,
    mean_kl,
    token_rewards,
    with_kl_penalty,
)
from distflow_jax.algorithms.masked import masked_count, masked_max, masked_mean, masked_min
from distflow_jax.algorithms.packed import counted, per_sequence, per_token
from distflow_jax.algorithms.policy_tokens import cleaned_logp
from distflow_jax.algorithms.value import explained_variance
from distflow_jax.batch import Rows
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.algorithm_tables import ADVANTAGES
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.layout import WEIGHT
from distflow_jax.stages.stage_context import ComputeContext, require


def build_advantage(context: ComputeContext) -> Stage:
    """score [K, R, S], rows, and what the algorithm needs beyond that (value,
    baseline, old_logp, ref_logp) -> advantage and returns [K, R, L], 0 outside responses.

    Returns are written where a critic's value is read: they are what it learns. The state is the
    coefficient of the KL in the reward, float32, where that is steered to a target.
    """
    algorithm = context.algorithm
    if algorithm.advantage == "grpo_passk" and context.num_samples < 2:
        raise ValueError(
            f"algorithm.advantage='grpo_passk' compares the responses to a prompt, got "
            f"rollout.num_samples={context.num_samples}; use at least 2"
        )
    estimate, kind = ESTIMATORS[algorithm.advantage], ADVANTAGES[algorithm.advantage]
    options = {name: getattr(algorithm, name) for name in kind.options}

    @jax.jit
    def compute(coef, rows, fields):
        given = rows.response_mask
        rows, fields = without_unscored(rows, fields)
        reward, coef, metrics = rewards_of(coef, rows, fields, algorithm)
        extra = {name: fields[name] for name in kind.reads}
        outcome = Outcome(reward, rows, context.prompts_per_step, **extra)
        advantage, returns = estimate(outcome, **options)
        mask = rows.response_mask
        score = per_sequence(reward, rows)
        metrics |= _summary("critic/rewards", score, counted(rows))
        metrics |= _summary("critic/advantages", advantage, mask)
        metrics |= _summary("critic/returns", returns, mask)
        if "value" in fields:
            metrics |= _summary("critic/values", fields["value"], mask)
            of_values = explained_variance(fields["value"], returns, mask)
            metrics["critic/vf_explained_var"] = of_values
            metrics[f"critic/vf_explained_var{WEIGHT}"] = masked_count(counted(rows))
            # nothing is known of a response without a score: the critic keeps its own values there
            returns = jnp.where(given & ~mask, fields["value"], returns)
        return coef, advantage, returns, metrics

    def advantage(state, fields, options):
        require(fields, advantage_reads(algorithm), f"algorithm.advantage={algorithm.advantage!r}")
        arrays = {name: fields[name] for name in _ARRAYS if name in fields}
        coef = jnp.float32(algorithm.kl_coef) if state is None else state
        coef, value, returns, metrics = compute(coef, fields["rows"], arrays)
        written = {"advantage": value} | ({"returns": returns} if "value" in fields else {})
        return (coef if algorithm.kl_target else state), written, metrics

    return advantage


def without_unscored(rows: Rows, fields: dict[str, jax.Array]) -> tuple[Rows, dict[str, jax.Array]]:
    """Rows and fields in which a response without a score or without its baseline (NaN) has no
    token, so that it leaves its group. `score` and `baseline` are [K, R, S].

    Its advantage is 0. In the update its tokens still count in denominators.
    """
    score = fields["score"]
    scored = ~jnp.isnan(score + fields.get("baseline", 0.0))
    mask = rows.response_mask & per_token(scored, rows.segment)
    length = jnp.where(scored, rows.length, 0)
    rows = dataclasses.replace(rows, response_mask=mask, length=length)
    cleaned = {n: jnp.where(scored, fields[n], 0.0) for n in ("score", "baseline") if n in fields}
    return rows, fields | cleaned


def first_coefficient(context: ComputeContext) -> np.float32 | None:
    """The state that an advantage begins with: a steered KL coefficient as the config gives it."""
    return np.float32(context.algorithm.kl_coef) if context.algorithm.kl_target else None


_ARRAYS = ("score", "value", "baseline", "old_logp", "ref_logp")


def rewards_of(
    coef: jax.Array, rows: Rows, fields: dict[str, jax.Array], algorithm: AlgorithmConfig
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """(rewards of tokens [K, R, L], coefficient of the next step, metrics)."""
    reward = token_rewards(fields["score"], rows)
    if not algorithm.kl_in_reward:
        return reward, coef, {}
    mask = rows.response_mask
    logp, ref_logp = (cleaned_logp(fields[name], mask) for name in ("old_logp", "ref_logp"))
    kl = KL_ESTIMATORS[algorithm.kl_estimator](logp, ref_logp)
    reward, mean = with_kl_penalty(reward, kl, rows, coef), mean_kl(kl, rows)
    sequences = masked_count(counted(rows))
    metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coef}
    metrics[f"actor/reward_kl_penalty{WEIGHT}"] = sequences
    if algorithm.kl_target:
        coef = adapted_coef(
            coef, mean, sequences, target=algorithm.kl_target, horizon=float(algorithm.kl_horizon)
        )
    return reward, coef, metrics


def _summary(prefix: str, x: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    return {
        f"{prefix}/mean": masked_mean(x, mask),
        f"{prefix}/mean{WEIGHT}": masked_count(mask),
        f"{prefix}/max": masked_max(x, mask),
        f"{prefix}/min": masked_min(x, mask),
    }


def advantage_reads(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Fields that the stage requires, by their names inside it."""
    penalty = ("old_logp", "ref_logp") if algorithm.kl_in_reward else ()
    return ("score", "rows", *ADVANTAGES[algorithm.advantage].reads, *penalty)
