"""The policy's objective: a policy loss, KL to a reference, an entropy bonus.

R rows, L tokens per row, S sequences per row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms import correction as correction_lib
from distflow_jax.algorithms.advantages import group_sum
from distflow_jax.algorithms.aggregate import denominator, token_weights, within_budget
from distflow_jax.algorithms.correction import rejected_sequences
from distflow_jax.algorithms.kl import KL_ESTIMATORS
from distflow_jax.algorithms.masked import masked_max, masked_sum
from distflow_jax.algorithms.packed import counted, per_sequence, per_token
from distflow_jax.algorithms.policy_losses import LOSSES, SELECTIONS
from distflow_jax.algorithms.policy_tokens import cleaned_logp, off_policy_terms, policy_tokens
from distflow_jax.algorithms.whole_batch import loss_waits
from distflow_jax.batch import Rows
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.algorithm_tables import A3PO, CORRECTIONS
from distflow_jax.layout import KEPT_WEIGHT, OF_GROUP, TOKENS_OF_AGE
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.training.forward import ForwardConfig, response_logp
from distflow_jax.training.objective import Metrics, Objective, Preview, at_least_one

GAPS = ("kl", "k3_kl")  # metrics that are told by age
GAP_OF_GROUP, TOKENS_OF_GROUP = (f"rollout_corr/{name}{OF_GROUP}" for name in ("gap", "tokens"))
_SQUARES = "rollout_corr/squared_weight"  # mean over tokens, for the effective sample size


class PolicyBatch(NamedTuple):
    """Fields of the policy's loss; those of rows are [R, L] and [R, S], the others [R, L]."""

    rows: Rows
    advantage: jax.Array
    rollout_logp: jax.Array | None
    old_logp: jax.Array | None  # None: the policy's own, without a gradient (one update per batch)
    ref_logp: jax.Array | None  # None: no KL term
    prox_alpha: jax.Array | None = None  # of correction.a3po_alpha
    age: jax.Array | None = None  # of tokens, in steps; None: metrics are not told by age
    # of the policy as it is before the optimizer step, for losses that select; no gradient
    current_logp: jax.Array | None = None
    selected: jax.Array | None = None  # bool, set by `prepare`: tokens that the loss selects
    budgeted: jax.Array | None = None  # bool, set by `prepare`: tokens that fixed-budget counts


class PolicyCounts(NamedTuple):
    """Global counts of rows, int32 scalars, and a mean over a whole optimizer step."""

    tokens: jax.Array  # masked-in response tokens
    sequences: jax.Array  # with at least one such token
    weight: jax.Array | None = None  # mean that the correction's weights are divided by, float32


class Denominators(NamedTuple):
    """Global counts and a mean of one optimizer step, float32 scalars."""

    loss: jax.Array  # of the aggregation
    tokens: jax.Array  # masked-in response tokens
    sequences: jax.Array  # with at least one such token
    weight: jax.Array | None = None  # mean that the correction's weights are divided by


class Apart(NamedTuple):
    """Kinds of tokens whose gaps are told apart."""

    max_staleness: int  # in steps; ages up to it
    num_groups: int  # of a step; 0: groups are not


def policy_objective(
    model: DecoderConfig,
    algorithm: AlgorithmConfig,
    forward: ForwardConfig,
    *,
    max_response: int,
    max_staleness: int = 0,
    num_groups: int = 0,
) -> Objective:
    """The objective that `algorithm` configures; `max_response` in tokens, `max_staleness` in
    steps. `num_groups`: of a step, whose gaps are told apart; 0: none."""
    return Objective(
        "actor",
        model,
        functools.partial(prepare, algorithm=algorithm),
        functools.partial(denominators_of, algorithm=algorithm, max_response=max_response),
        functools.partial(
            evaluate,
            model=model,
            algorithm=algorithm,
            forward=forward,
            apart=Apart(max_staleness, num_groups),
        ),
        _finish,
        preview=_preview(model, algorithm, forward) if algorithm.selects else None,
        waits=loss_waits(algorithm),
    )


def _preview(model: DecoderConfig, algorithm: AlgorithmConfig, forward: ForwardConfig) -> Preview:
    """Log-probs of the current policy, which losses that select tokens choose by."""

    def predict(params, batch, temperature):
        return response_logp(params, model, batch.rows, temperature, forward)[0]

    def known(batch):
        # other proximal policies than the recomputed one are not the policy at the start
        return batch.old_logp if algorithm.proximal == "recomputed" else None

    return Preview(predict, lambda batch, logp: batch._replace(current_logp=logp), known)


def prepare(
    batch: PolicyBatch, before: PolicyCounts | None = None, *, algorithm: AlgorithmConfig
) -> tuple[PolicyBatch, PolicyCounts]:
    """Counts of an optimizer step or of a partial batch, and selections among all of its tokens."""
    rows = batch.rows
    tokens = rows.response_mask.sum(dtype=jnp.int32)
    sequences = (rows.length > 0).sum(dtype=jnp.int32)  # fully masked ones do not count
    if algorithm.loss_aggregation == "fixed-budget":
        spent = None if before is None else before.tokens
        batch = batch._replace(budgeted=within_budget(rows, algorithm.token_budget, spent))
    if algorithm.selects:
        assert batch.current_logp is not None, "set by the objective's preview"
        logp = batch.current_logp
        chosen = policy_tokens(logp, proximal_logp(logp, batch, algorithm), batch.advantage, rows)
        select = SELECTIONS[algorithm.policy_loss]
        batch = batch._replace(selected=select(chosen, **algorithm.select_options))
    return batch, PolicyCounts(tokens, sequences, _mean_weight(batch, algorithm))


def denominators_of(
    counts: PolicyCounts, *, algorithm: AlgorithmConfig, max_response: int
) -> Denominators:
    """Denominators of an optimizer step with these counts."""
    tokens, sequences, weight = counts
    mode, budget = algorithm.loss_aggregation, algorithm.token_budget
    total = denominator(mode, tokens, sequences, norm=float(max_response), budget=budget)
    return Denominators(*at_least_one((total, tokens, sequences)), weight)


def _mean_weight(batch: PolicyBatch, algorithm: AlgorithmConfig) -> jax.Array | None:
    """Mean of the correction's weights over an optimizer step, where they are normalised by it."""
    if not algorithm.correction_batch_normalize:
        return None
    assert batch.old_logp is not None, "update_reads lists it"
    kind, rows = CORRECTIONS[algorithm.correction], batch.rows
    log_ratio = correction_lib.log_rho(batch.old_logp, batch.rollout_logp, rows)
    correct = correction_lib.WEIGHTS[algorithm.correction]
    found = correct(log_ratio, rows, **algorithm.correction_bounds)
    return correction_lib.mean_weight(kind, found.weight, rows)


def evaluate(
    params: Any,
    batch: PolicyBatch,
    denominators: Denominators,
    temperature: jax.Array,
    *,
    model: DecoderConfig,
    algorithm: AlgorithmConfig,
    forward: ForwardConfig,
    apart: Apart,
) -> tuple[jax.Array, Metrics]:
    """Contribution of a micro-batch to the loss, a scalar, and to the metrics."""
    rows, mask = batch.rows, batch.rows.response_mask
    logp, entropy = response_logp(params, model, rows, temperature, forward)
    old_logp = proximal_logp(logp, batch, algorithm)
    tokens = policy_tokens(logp, old_logp, batch.advantage, rows, batch.selected)
    policy = LOSSES[algorithm.policy_loss](tokens, **algorithm.policy_options)
    counted_mask = mask if batch.budgeted is None else mask & batch.budgeted
    lengths = per_token(rows.length, rows.segment)
    weight = token_weights(algorithm.loss_aggregation, counted_mask, lengths)

    def aggregate(x):
        return masked_sum(x * weight, counted_mask) / denominators.loss

    def mean(x):
        return masked_sum(jax.lax.stop_gradient(x), mask) / denominators.tokens

    trainer = old_logp if algorithm.proximal == "recomputed" else logp
    correction, sums, maxima = _correction(old_logp, trainer, batch, algorithm, denominators)
    if batch.rollout_logp is not None:
        more, largest = _off_policy(trainer, batch, denominators, mean, apart)
        sums, maxima = sums | more, maxima | largest
    pg_loss = aggregate(policy.loss if correction is None else policy.loss * correction)
    loss = pg_loss - algorithm.entropy_coef * aggregate(entropy)
    sums |= {
        "actor/pg_loss": pg_loss,
        "actor/entropy": mean(entropy),
        "actor/pg_clipfrac": mean(policy.clipped),
        "actor/pg_clipfrac_lower": mean(policy.clipped_lower),
        "actor/ppo_kl": mean(tokens.old_logp - tokens.logp),
    }
    if batch.budgeted is not None:
        sums["actor/budget_share"] = aggregate(jnp.ones_like(weight))
    if batch.ref_logp is not None and not algorithm.kl_in_reward:
        ref_logp = cleaned_logp(batch.ref_logp, mask)
        kl = KL_ESTIMATORS[algorithm.kl_estimator](tokens.logp, ref_logp)
        kl_loss = aggregate(kl)
        loss = loss + algorithm.kl_coef * kl_loss
        sums["actor/kl_loss"] = kl_loss
    return loss, jax.lax.stop_gradient({"sum": sums, "max": maxima})


def _off_policy(
    trainer: jax.Array,
    batch: PolicyBatch,
    denominators: Denominators,
    mean: Callable[[jax.Array], jax.Array],
    apart: Apart,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(sums, maxima) of how far the samplers' log-probs are from the trainer's [R, L]: over all
    tokens, and over those of each age and of each group."""
    assert batch.rollout_logp is not None
    terms, sequences = (
        off_policy_terms(trainer, batch.rollout_logp, batch.rows),
        counted(batch.rows),
    )
    sums = {f"rollout_corr/{name}": mean(x) for name, x in terms.tokens.items()}
    if batch.age is not None:
        gaps = {name: terms.tokens[name] for name in GAPS}
        sums |= _by_age(gaps, batch.age, apart.max_staleness, mean)
    if apart.num_groups:
        sums |= {
            name: group_sum(x, batch.rows.group, apart.num_groups) / denominators.tokens
            for name, x in _by_sequence(terms.tokens["kl"], batch.rows).items()
        }
    sums |= {
        f"rollout_corr/{name}": masked_sum(x, sequences) / denominators.sequences
        for name, x in terms.sequences.items()
    }
    largest = masked_max(terms.sequences["log_ppl_diff"], sequences)
    return sums, {"rollout_corr/log_ppl_diff_max": largest}


def _by_age(
    terms: dict[str, jax.Array],
    age: jax.Array,
    max_staleness: int,
    mean: Callable[[jax.Array], jax.Array],
) -> dict[str, jax.Array]:
    """Parts that tokens of each age have of the means of terms [R, L], and their share of tokens.

    The means by age are those sums over the shares (coordinator/batch_metrics.py).
    """
    found = {}
    for number in range(max_staleness + 1):
        here = age == number
        found[f"rollout_corr/{TOKENS_OF_AGE}/{number}"] = mean(here.astype(jnp.float32))
        for name, x in terms.items():
            found[f"rollout_corr/{name}/{number}"] = mean(jnp.where(here, x, 0.0))
    return found


def _by_sequence(log_gap: jax.Array, rows: Rows) -> dict[str, jax.Array]:
    """Of each sequence the sum of the gaps [R, L] of its tokens without their signs, and its
    tokens; float32 [R, S], by the names of their sums over groups."""
    gaps = jax.lax.stop_gradient(per_sequence(jnp.abs(log_gap), rows))
    tokens = jnp.where(counted(rows), rows.length, 0).astype(jnp.float32)
    return {GAP_OF_GROUP: gaps, TOKENS_OF_GROUP: tokens}


def _finish(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The metrics, with verl's effective sample size in place of the mean of squared weights."""
    squares = metrics.pop(_SQUARES, None)
    if squares is not None:
        size = metrics["rollout_corr/rollout_is_mean"] ** 2 / jnp.where(squares > 0, squares, 1.0)
        metrics["rollout_corr/rollout_is_eff_sample_size"] = size
    return metrics


def proximal_logp(logp: jax.Array, batch: PolicyBatch, algorithm: AlgorithmConfig) -> jax.Array:
    """Log-probs of the proximal policy, the ratio's denominator, [R, L], without a gradient."""
    if algorithm.proximal == "rollout":
        return batch.rollout_logp
    if algorithm.proximal in A3PO:
        rollout_logp = cleaned_logp(batch.rollout_logp, batch.rows.response_mask)
        return correction_lib.a3po_proximal(logp, rollout_logp, batch.prox_alpha)
    return jax.lax.stop_gradient(logp) if batch.old_logp is None else batch.old_logp


def _correction(
    old_logp: jax.Array,
    trainer: jax.Array,
    batch: PolicyBatch,
    algorithm: AlgorithmConfig,
    denominators: Denominators,
) -> tuple[jax.Array | None, dict[str, jax.Array], dict[str, jax.Array]]:
    """(weight per token or None, metrics that are sums, metrics that are maxima).

    `old_logp`: of the proximal policy; `trainer`: of the trainer, whose gap to the sampler is
    measured. Both [R, L].
    """
    sums: dict[str, jax.Array] = {}
    maxima: dict[str, jax.Array] = {}
    if batch.rollout_logp is None:
        return None, sums, maxima
    rows, mask = batch.rows, batch.rows.response_mask

    def mean(x):
        return masked_sum(x, mask) / denominators.tokens

    reference = jax.lax.stop_gradient(trainer)
    gap = jnp.where(mask, jnp.abs(jnp.exp(reference) - jnp.exp(batch.rollout_logp)), 0.0)
    log_gap = jnp.abs(correction_lib.log_rho(reference, batch.rollout_logp, rows))
    sums["training/rollout_probs_diff_mean"] = mean(gap)
    sums["rollout_corr/log_ratio_abs_mean"] = mean(log_gap)
    maxima["training/rollout_probs_diff_max"] = masked_max(gap, mask)
    maxima["rollout_corr/log_ratio_abs_max"] = masked_max(log_gap, mask)
    log_ratio = correction_lib.log_rho(old_logp, batch.rollout_logp, rows)
    weight = None
    if algorithm.correction != "none":
        found = correction_lib.WEIGHTS[algorithm.correction](
            log_ratio, rows, **algorithm.correction_bounds
        )
        weight = found.weight
        sums["rollout_corr/rollout_is_mean"] = mean(weight)
        if batch.age is not None:  # the program of a synchronous run stays what it was
            sums[_SQUARES] = mean(weight**2)
        if denominators.weight is not None:
            factor = denominators.weight
            weight = weight / factor
            # the same for all micro-batches, whose shares of the tokens add up to 1
            sums["rollout_corr/rollout_is_batch_norm_factor"] = mean(jnp.full_like(weight, factor))
        if algorithm.loss_kind.of_sequences:
            weight = correction_lib.geometric_mean(weight, rows)
        sums["rollout_corr/rollout_is_changed_fraction"] = mean(found.changed.astype(jnp.float32))
        maxima["rollout_corr/rollout_is_max"] = masked_max(found.weight, mask)
    if algorithm.rejection != "none":
        found = correction_lib.WEIGHTS[algorithm.rejection](
            log_ratio, rows, **algorithm.rejection_bounds
        )
        weight = found.weight if weight is None else weight * found.weight
        sums["rollout_corr/rollout_rs_masked_fraction"] = mean(found.changed.astype(jnp.float32))
        rejected = rejected_sequences(found, rows).astype(jnp.float32)
        sums["rollout_corr/rollout_rs_seq_masked_fraction"] = (
            masked_sum(rejected, counted(rows)) / denominators.sequences
        )
    if weight is not None:
        # a maximum, not a share: it is 0 exactly where nothing is left to train on
        maxima[KEPT_WEIGHT] = masked_max(weight, mask)
    return weight, sums, maxima
