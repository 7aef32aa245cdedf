"""Off-policy metrics: how far the trainer's policy is from the one that sampled.

With verl's names (rollout_corr/*), reverse_kl excepted. rho = exp(trainer - sampler), the trainer's
probability of a token over the sampler's. A metric is the mean over a step of its terms here, over
response tokens or over sequences. R rows, L tokens per row, S sequences per row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.packed import per_sequence, sequence_mean
from distflow_jax.algorithms.policy_tokens import MAX_LOG_RATIO, cleaned_logp
from distflow_jax.batch import Rows


class OffPolicyTerms(NamedTuple):
    """Terms of the metrics, by name; values outside the mask, or of empty sequences, are free."""

    tokens: dict[str, jax.Array]  # float32 [R, L] each
    sequences: dict[str, jax.Array]  # float32 [R, S] each


def off_policy_terms(
    trainer_logp: jax.Array, sampler_logp: jax.Array, rows: Rows
) -> OffPolicyTerms:
    """Terms from the log-probs [R, L] of both policies, without a gradient.

    kl: log 1 / rho, and k3_kl: rho - 1 - log rho, of KL(sampler || trainer); reverse_kl: 1 - rho +
    rho log rho, of KL(trainer || sampler). chi2_token: rho^2 - 1; chi2_seq: (prod rho)^2 - 1.
    training_ppl, rollout_ppl: exp(-mean logp) of a sequence, *_log_ppl its logarithm; log_ppl_diff:
    log(training_ppl / rollout_ppl), ppl_ratio its exponential. Liu, Li et al. 2025 ("When speed
    kills stability", yingru.notion.site); KL estimators: Schulman 2020
    (joschu.net/blog/kl-approx.html).
    """
    mask = rows.response_mask
    trainer, sampler = (
        jax.lax.stop_gradient(cleaned_logp(x, mask)) for x in (trainer_logp, sampler_logp)
    )
    log_rho = trainer - sampler
    bounded = jnp.clip(log_rho, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1: small gaps, the usual ones, would cancel all digits
    excess = jnp.expm1(bounded)
    tokens = {
        "kl": -log_rho,
        "k3_kl": excess - bounded,
        "reverse_kl": (1.0 + excess) * bounded - excess,
        "chi2_token": jnp.expm1(2.0 * bounded),
    }
    whole = jnp.clip(per_sequence(log_rho, rows), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_ppl = [-sequence_mean(x, rows) for x in (trainer, sampler)]
    difference = log_ppl[0] - log_ppl[1]
    sequences = {
        "training_ppl": jnp.exp(log_ppl[0]),
        "training_log_ppl": log_ppl[0],
        "rollout_ppl": jnp.exp(log_ppl[1]),
        "rollout_log_ppl": log_ppl[1],
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": jnp.abs(difference),
        "ppl_ratio": jnp.exp(difference),
        "chi2_seq": jnp.expm1(2.0 * whole),
    }
    return OffPolicyTerms(tokens, sequences)
