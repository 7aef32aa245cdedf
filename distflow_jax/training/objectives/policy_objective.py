"""The policy's objective: a policy loss, KL to a reference, an entropy bonus.

R rows, L tokens per row, S sequences per row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms import correction as correction_lib
from distflow_jax.algorithms.aggregate import denominator, token_weights, within_budget
from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.algorithms.correction import CORRECTIONS, REJECTIONS, rejected_sequences
from distflow_jax.algorithms.kl import KL_ESTIMATORS
from distflow_jax.algorithms.masked import masked_max, masked_sum
from distflow_jax.algorithms.packed import counted, per_token
from distflow_jax.algorithms.policy_losses import POLICY_LOSSES, policy_tokens
from distflow_jax.batch import Rows
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.training.forward import ForwardConfig, response_logp
from distflow_jax.training.objective import Metrics, Objective


class PolicyBatch(NamedTuple):
    """Fields of the policy's loss; those of rows are [R, L] and [R, S], the others [R, L]."""

    rows: Rows
    advantage: jax.Array
    rollout_logp: jax.Array | None
    old_logp: jax.Array | None  # None: the policy's own, without a gradient (one update per batch)
    ref_logp: jax.Array | None  # None: no KL term
    prox_alpha: jax.Array | None = None  # of correction.a3po_alpha
    selected: jax.Array | None = None  # bool, set by `prepare`: tokens that the loss selects
    budgeted: jax.Array | None = None  # bool, set by `prepare`: tokens that fixed-budget counts


class Denominators(NamedTuple):
    """Global counts of one optimizer step, float32 scalars."""

    loss: jax.Array  # of the aggregation
    tokens: jax.Array  # masked-in response tokens
    sequences: jax.Array  # with at least one such token


def policy_objective(
    model: DecoderConfig,
    algorithm: AlgorithmConfig,
    forward: ForwardConfig,
    *,
    max_response: int,
) -> Objective:
    """The objective that `algorithm` configures; `max_response` is in tokens."""
    return Objective(
        "actor",
        model,
        functools.partial(prepare, algorithm=algorithm, max_response=max_response),
        functools.partial(evaluate, model=model, algorithm=algorithm, forward=forward),
    )


def prepare(
    batch: PolicyBatch, *, algorithm: AlgorithmConfig, max_response: int
) -> tuple[PolicyBatch, Denominators]:
    """Denominators of an optimizer step, and selections among all of its tokens."""
    rows = batch.rows
    tokens = rows.response_mask.sum(dtype=jnp.int32)
    sequences = (rows.length > 0).sum(dtype=jnp.int32)  # fully masked ones do not count
    mode, budget = algorithm.loss_aggregation, algorithm.token_budget
    total = denominator(mode, tokens, sequences, norm=float(max_response), budget=budget)
    if mode == "fixed-budget":
        batch = batch._replace(budgeted=within_budget(rows, budget))
    select = POLICY_LOSSES[algorithm.policy_loss].select
    if select is not None:
        old_logp = batch.rollout_logp if algorithm.proximal == "rollout" else batch.old_logp
        assert old_logp is not None, "AlgorithmConfig.update_reads lists it"
        chosen = policy_tokens(old_logp, old_logp, batch.advantage, rows)
        batch = batch._replace(selected=select(chosen, **algorithm.select_options))
    counts = (jnp.maximum(x.astype(jnp.float32), 1.0) for x in (total, tokens, sequences))
    return batch, Denominators(*counts)


def evaluate(
    params: Any,
    batch: PolicyBatch,
    denominators: Denominators,
    temperature: jax.Array,
    *,
    model: DecoderConfig,
    algorithm: AlgorithmConfig,
    forward: ForwardConfig,
) -> tuple[jax.Array, Metrics]:
    """Contribution of a micro-batch to the loss, a scalar, and to the metrics."""
    rows, mask = batch.rows, batch.rows.response_mask
    logp, entropy = response_logp(params, model, rows, temperature, forward)
    old_logp = proximal_logp(logp, batch, algorithm)
    kind = POLICY_LOSSES[algorithm.policy_loss]
    tokens = policy_tokens(logp, old_logp, batch.advantage, rows, batch.selected)
    policy = kind.loss(tokens, **algorithm.policy_options)
    counted_mask = mask if batch.budgeted is None else mask & batch.budgeted
    lengths = per_token(rows.length, rows.segment)
    weight = token_weights(algorithm.loss_aggregation, counted_mask, lengths)

    def aggregate(x):
        return masked_sum(x * weight, counted_mask) / denominators.loss

    def mean(x):
        return masked_sum(jax.lax.stop_gradient(x), mask) / denominators.tokens

    correction, sums, maxima = _correction(old_logp, batch, algorithm, denominators)
    pg_loss = aggregate(policy.loss if correction is None else policy.loss * correction)
    loss = pg_loss - algorithm.entropy_coef * aggregate(entropy)
    sums |= {
        "actor/pg_loss": pg_loss,
        "actor/entropy": mean(entropy),
        "actor/pg_clipfrac": mean(policy.clipped),
        "actor/pg_clipfrac_lower": mean(policy.clipped_lower),
        "actor/ppo_kl": mean(tokens.old_logp - tokens.logp),
    }
    if batch.ref_logp is not None and not algorithm.kl_in_reward:
        kl = KL_ESTIMATORS[algorithm.kl_estimator](logp, jnp.where(mask, batch.ref_logp, 0.0))
        kl_loss = aggregate(kl)
        loss = loss + algorithm.kl_coef * kl_loss
        sums["actor/kl_loss"] = kl_loss
    return loss, jax.lax.stop_gradient({"sum": sums, "max": maxima})


def proximal_logp(logp: jax.Array, batch: PolicyBatch, algorithm: AlgorithmConfig) -> jax.Array:
    """Log-probs of the proximal policy, the ratio's denominator, [R, L], without a gradient."""
    if algorithm.proximal == "rollout":
        return batch.rollout_logp
    if algorithm.proximal == "a3po":
        return correction_lib.a3po_proximal(logp, batch.rollout_logp, batch.prox_alpha)
    return jax.lax.stop_gradient(logp) if batch.old_logp is None else batch.old_logp


def _correction(
    old_logp: jax.Array,
    batch: PolicyBatch,
    algorithm: AlgorithmConfig,
    denominators: Denominators,
) -> tuple[jax.Array | None, dict[str, jax.Array], dict[str, jax.Array]]:
    """(weight per token or None, metrics that are sums, metrics that are maxima)."""
    sums: dict[str, jax.Array] = {}
    maxima: dict[str, jax.Array] = {}
    if batch.rollout_logp is None:
        return None, sums, maxima
    rows, mask = batch.rows, batch.rows.response_mask

    def mean(x):
        return masked_sum(x, mask) / denominators.tokens

    reference = jax.lax.stop_gradient(old_logp)
    gap = jnp.where(mask, jnp.abs(jnp.exp(reference) - jnp.exp(batch.rollout_logp)), 0.0)
    log_ratio = correction_lib.log_rho(old_logp, batch.rollout_logp, rows)
    sums["training/rollout_probs_diff_mean"] = mean(gap)
    sums["rollout_corr/log_ratio_abs_mean"] = mean(jnp.abs(log_ratio))
    maxima["training/rollout_probs_diff_max"] = masked_max(gap, mask)
    maxima["rollout_corr/log_ratio_abs_max"] = masked_max(jnp.abs(log_ratio), mask)
    weight = None
    if algorithm.correction != "none":
        found = CORRECTIONS[algorithm.correction].correct(
            log_ratio, rows, **algorithm.correction_bounds
        )
        weight = found.weight
        sums["rollout_corr/rollout_is_mean"] = mean(weight)
        sums["rollout_corr/rollout_is_changed_fraction"] = mean(found.changed.astype(jnp.float32))
        maxima["rollout_corr/rollout_is_max"] = masked_max(weight, mask)
    if algorithm.rejection != "none":
        found = REJECTIONS[algorithm.rejection].correct(
            log_ratio, rows, **algorithm.rejection_bounds
        )
        weight = found.weight if weight is None else weight * found.weight
        sums["rollout_corr/rollout_rs_masked_fraction"] = mean(found.changed.astype(jnp.float32))
        rejected = rejected_sequences(found, rows).astype(jnp.float32)
        sums["rollout_corr/rollout_rs_seq_masked_fraction"] = (
            masked_sum(rejected, counted(rows)) / denominators.sequences
        )
    return weight, sums, maxima
