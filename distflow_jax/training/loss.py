"""The policy objective of one micro-batch, as sums over its tokens.

R rows, L tokens per row.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.advantages import ADVANTAGES
from distflow_jax.algorithms.aggregate import AGGREGATIONS, denominator, token_weights
from distflow_jax.algorithms.kl import KL_ESTIMATORS
from distflow_jax.algorithms.masked import masked_max, masked_sum
from distflow_jax.algorithms.policy_losses import POLICY_LOSSES
from distflow_jax.batch import Rows
from distflow_jax.models.config import DecoderConfig
from distflow_jax.training.forward import ForwardConfig, per_token, response_logp


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """What is optimised. Names come from the tables in distflow_jax/algorithms."""

    advantage: str = "grpo"
    policy_loss: str = "ppo_clip"
    clip_low: float = 0.2  # ratio is clipped below 1 - clip_low
    clip_high: float = 0.2  # and above 1 + clip_high; 0.28 is DAPO's clip-higher
    dual_clip: float = 3.0  # bound of the loss where the advantage is negative; must be above 1
    aggregation: str = "token-mean"
    kl_coef: float = 0.0  # weight of KL(policy || reference) in the loss; 0: no reference model
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0  # weight of the entropy bonus

    def __post_init__(self):
        for field, table in (
            ("advantage", ADVANTAGES),
            ("policy_loss", POLICY_LOSSES),
            ("aggregation", AGGREGATIONS),
            ("kl_estimator", KL_ESTIMATORS),
        ):
            if getattr(self, field) not in table:
                raise ValueError(
                    f"algorithm.{field}={getattr(self, field)!r} is unknown; "
                    f"choose one of {sorted(table)}"
                )
        if self.kl_coef and self.kl_estimator == "k1":
            raise ValueError(
                "algorithm.kl_estimator='k1' has zero expected gradient as a loss; use k2, k3, k3+"
            )
        if not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise ValueError(
                f"algorithm.clip_low must be in (0, 1) and clip_high positive, got "
                f"{self.clip_low} and {self.clip_high}"
            )
        if self.dual_clip <= 1:
            raise ValueError(f"algorithm.dual_clip must be above 1, got {self.dual_clip}")
        if self.kl_coef < 0:
            raise ValueError(f"algorithm.kl_coef must not be negative, got {self.kl_coef}")


class Denominators(NamedTuple):
    """Global counts of one optimizer step, float32 scalars."""

    loss: jax.Array  # what the aggregation divides by
    tokens: jax.Array  # masked-in response tokens


class MicroBatch(NamedTuple):
    """What the loss reads; rows' fields are [R, L] and [R, S], the others [R, L]."""

    rows: Rows
    advantage: jax.Array
    rollout_logp: jax.Array | None
    old_logp: jax.Array | None  # None: the policy itself, held fixed (one update per batch)
    ref_logp: jax.Array | None  # None: no KL term


def step_denominators(config: AlgorithmConfig, rows: Rows, max_response: int) -> Denominators:
    """Counts over all rows of an optimizer step, on every device of the mesh alike."""
    tokens = rows.response_mask.sum(dtype=jnp.int32)
    # a fully masked sequence counts nowhere
    sequences = (rows.length > 0).sum(dtype=jnp.int32)
    total = denominator(config.aggregation, tokens, sequences, float(max_response))
    return Denominators(jnp.maximum(total, 1.0), jnp.maximum(tokens.astype(jnp.float32), 1.0))


def policy_objective(
    params: Any,
    batch: MicroBatch,
    denominators: Denominators,
    temperature: jax.Array,
    *,
    model: DecoderConfig,
    algorithm: AlgorithmConfig,
    forward: ForwardConfig,
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    """Share of this micro-batch in the loss, and its share in the metrics.

    Metrics come as {"sum": {...}, "max": {...}}: sums are already divided by the step's
    denominators, so that adding them up over micro-batches gives the step's value.
    """
    rows = batch.rows
    mask = rows.response_mask
    logp, entropy = response_logp(params, model, rows, temperature, forward)
    old_logp = jax.lax.stop_gradient(logp) if batch.old_logp is None else batch.old_logp
    policy = POLICY_LOSSES[algorithm.policy_loss](
        logp,
        old_logp,
        batch.advantage,
        mask,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    weight = token_weights(algorithm.aggregation, mask, per_token(rows.length, rows.segment))

    def aggregate(x):
        return masked_sum(x * weight, mask) / denominators.loss

    def mean(x):
        return masked_sum(jax.lax.stop_gradient(x), mask) / denominators.tokens

    pg_loss = aggregate(policy.loss)
    loss = pg_loss - algorithm.entropy_coef * aggregate(entropy)
    sums = {
        "actor/pg_loss": pg_loss,
        "actor/entropy": mean(entropy),
        "actor/pg_clipfrac": mean(policy.clipped),
        "actor/pg_clipfrac_lower": mean(policy.clipped_lower),
        "actor/ppo_kl": mean(-policy.log_ratio),
    }
    maxima = {}
    if batch.ref_logp is not None:
        kl = aggregate(KL_ESTIMATORS[algorithm.kl_estimator](logp, batch.ref_logp))
        loss = loss + algorithm.kl_coef * kl
        sums["actor/kl_loss"] = kl
    if batch.rollout_logp is not None:
        reference = jax.lax.stop_gradient(old_logp)
        gap = jnp.where(mask, jnp.abs(jnp.exp(reference) - jnp.exp(batch.rollout_logp)), 0.0)
        drift = jnp.where(mask, reference - batch.rollout_logp, 0.0)
        sums["training/rollout_probs_diff_mean"] = mean(gap)
        sums["rollout_corr/log_ratio_abs_mean"] = mean(jnp.abs(drift))
        maxima["training/rollout_probs_diff_max"] = masked_max(gap, mask)
        maxima["rollout_corr/log_ratio_abs_max"] = masked_max(jnp.abs(drift), mask)
    sums["actor/loss"] = loss
    return loss, jax.lax.stop_gradient({"sum": sums, "max": maxima})
