"""Arguments of a policy loss, the ratio of two policies, and metrics of how far apart they are.

The off-policy metrics (of the trainer's policy and the one that sampled) have verl's names
(rollout_corr/*), reverse_kl excepted. A metric is the mean over a step of its terms here, over
response tokens or over sequences. R rows, L tokens per row, S sequences per row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.packed import per_sequence, sequence_mean
from distflow_jax.batch import Rows

MAX_LOG_RATIO = 20.0  # keeps exp(log ratio) finite, also in products and squares
LEAST_LOGP = -1e6  # stands for -inf, whose differences are nan; exp is 0 from -104 on


class PolicyTokens(NamedTuple):
    """Arguments of a policy loss, [R, L] each, 0 outside the mask; made by policy_tokens."""

    logp: jax.Array
    old_logp: jax.Array  # of the proximal policy, at the start of the optimizer step; no gradient
    advantage: jax.Array
    rows: Rows
    selected: jax.Array | None = None  # bool: tokens chosen over the whole step (`select`)


def cleaned_logp(logp: jax.Array, mask: jax.Array) -> jax.Array:
    """Log-probs of any shape: 0 outside the mask, even for inf and nan; at least LEAST_LOGP, below
    which a token has no gradient."""
    return jnp.where(mask, jnp.maximum(logp, LEAST_LOGP), 0.0)


def policy_tokens(
    logp: jax.Array,
    old_logp: jax.Array,
    advantage: jax.Array,
    rows: Rows,
    selected: jax.Array | None = None,
) -> PolicyTokens:
    """Arguments of a policy loss, [R, L] each; 0 outside response_mask, even for inf and nan."""
    # before any exp: a masked-out inf would give 0 * inf = nan in the gradient
    mask = rows.response_mask
    logp, old_logp = cleaned_logp(logp, mask), cleaned_logp(old_logp, mask)
    selected = None if selected is None else mask & selected
    return PolicyTokens(logp, old_logp, jnp.where(mask, advantage, 0.0), rows, selected)


def ratio_of(log_ratio: jax.Array) -> jax.Array:
    """exp(log_ratio), any shape, with the exponent clipped to +-20."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def indicator(x: jax.Array) -> jax.Array:
    """A mask of any shape as float32."""
    return x.astype(jnp.float32)


def clipped_surrogate(
    ratio: jax.Array, advantage: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and a mask where the second term is larger.

    `ratio` and `advantage` are [R, L], and so are both results.
    """
    plain = -advantage * ratio
    clipped = -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(plain, clipped), clipped > plain


class OffPolicyTerms(NamedTuple):
    """Terms of the metrics, by name; values outside the mask, or of empty sequences, are free."""

    tokens: dict[str, jax.Array]  # float32 [R, L] each
    sequences: dict[str, jax.Array]  # float32 [R, S] each


def off_policy_terms(
    trainer_logp: jax.Array, sampler_logp: jax.Array, rows: Rows
) -> OffPolicyTerms:
    """Terms from the log-probs [R, L] of both policies, without a gradient.

    rho = exp(trainer - sampler), the trainer's probability of a token over the sampler's.

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
