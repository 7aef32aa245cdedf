"""Per-token policy losses: their common arguments and results, and the table LOSSES of functions.

POLICY_LOSSES (config/algorithm_tables.py) has their options.
R rows, L tokens per row, S sequences per row. Aggregation (aggregate.py) and correction weights
(correction.py) are the same for every loss and are applied elsewhere.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.covariance import select_clip_cov, select_kl_cov
from distflow_jax.algorithms.kl import absolute
from distflow_jax.algorithms.packed import per_token, sequence_mean
from distflow_jax.algorithms.policy_tokens import (
    MAX_LOG_RATIO,
    PolicyTokens,
    clipped_surrogate,
    indicator,
    ratio_of,
)


class PolicyLoss(NamedTuple):
    """Per-token loss and the indicators for verl's clip metrics, float32 [R, L] each."""

    loss: jax.Array
    clipped: jax.Array  # 1 where the clipped branch is the larger one
    clipped_lower: jax.Array  # 1 where the dual clip is active


def _unclipped(loss: jax.Array) -> PolicyLoss:
    return PolicyLoss(loss, jnp.zeros_like(loss), jnp.zeros_like(loss))


def _dual_clipped(
    ratio: jax.Array,
    advantage: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    loss, clipped = clipped_surrogate(ratio, advantage, clip_low, clip_high)
    if dual_clip is None:
        return PolicyLoss(loss, indicator(clipped), jnp.zeros_like(loss))
    floor = -advantage * dual_clip
    negative = advantage < 0
    lower = negative & (loss > floor)
    loss = jnp.where(negative, jnp.minimum(loss, floor), loss)
    return PolicyLoss(loss, indicator(clipped), indicator(lower))


def ppo_clip(
    tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float
) -> PolicyLoss:
    """PPO's clipped surrogate max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A c for A < 0.

    r = exp(clip(logp - old, -20, 20)); c > 1 is the dual clip. Schulman et al. 2017
    (arxiv.org/abs/1707.06347), eq. 7; two bounds: Yu et al. 2025 (arxiv.org/abs/2503.14476), eq. 5;
    dual clip: Ye et al. 2020 (arxiv.org/abs/1912.09729), eq. 5.
    """
    ratio = ratio_of(tokens.logp - tokens.old_logp)
    return _dual_clipped(ratio, tokens.advantage, clip_low, clip_high, dual_clip)


def gspo(
    tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    """GSPO: ppo_clip with the sequence's ratio, log s = sum(logp - old) / length, at most 10.

    A token's ratio is exp(sg(log s) + logp - sg(logp)), which allows advantages that differ between
    the tokens of a sequence. No dual clip with `dual_clip` None, as in Zheng et al. 2025
    (arxiv.org/abs/2507.18071), eq. 5.
    """
    log_s = jnp.minimum(sequence_mean(tokens.logp - tokens.old_logp, tokens.rows), 10.0)
    log_s = per_token(jax.lax.stop_gradient(log_s), tokens.rows.segment)
    ratio = ratio_of(log_s + (tokens.logp - jax.lax.stop_gradient(tokens.logp)))
    return _dual_clipped(ratio, tokens.advantage, clip_low, clip_high, dual_clip)


def cispo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A logp. Every token keeps a gradient.

    MiniMax 2025 (arxiv.org/abs/2506.13585).
    """
    ratio = jax.lax.stop_gradient(ratio_of(tokens.logp - tokens.old_logp))
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = -bounded * tokens.advantage * tokens.logp
    return PolicyLoss(loss, indicator(bounded != ratio), jnp.zeros_like(loss))


def sapo(tokens: PolicyTokens, *, sapo_tau_positive: float, sapo_tau_negative: float) -> PolicyLoss:
    """SAPO: -A (4 / tau) sigmoid(tau (r - 1)), a smooth form of clipping.

    tau depends on the sign of A. Gao et al. 2025 (arxiv.org/abs/2511.20347).
    """
    ratio = ratio_of(tokens.logp - tokens.old_logp)
    tau = jnp.where(tokens.advantage > 0, sapo_tau_positive, jnp.float32(sapo_tau_negative))
    return _unclipped(-tokens.advantage * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0)))


def gmpo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """GMPO: -A_i exp(mean_t q_t), with the geometric mean of a sequence's clipped ratios.

    q = sign(A) min(sign(A) d, sign(A) clip(d, -low, high)), d = logp - old. A_i is the mean of A
    over the sequence. Zhao et al. 2025 (arxiv.org/abs/2507.20673).
    """
    rows, d, sign = tokens.rows, tokens.logp - tokens.old_logp, jnp.sign(tokens.advantage)
    bounded = sign * jnp.clip(d, -clip_low, clip_high)
    q = sign * jnp.minimum(sign * d, bounded)
    loss = -sequence_mean(tokens.advantage, rows) * ratio_of(sequence_mean(q, rows))
    return PolicyLoss(
        per_token(loss, rows.segment), indicator(bounded < sign * d), jnp.zeros_like(d)
    )


def _dppo(
    tokens: PolicyTokens, far_up: jax.Array, far_down: jax.Array, largest: float
) -> PolicyLoss:
    """-A min(r, largest) logp, with a gradient of logp alone; 0 on tokens too far from the old
    policy, in the direction that the advantage pushes to."""
    ratio = jax.lax.stop_gradient(ratio_of(tokens.logp - tokens.old_logp))
    far = jax.lax.stop_gradient(jnp.where(tokens.advantage > 0, far_up, far_down))
    loss = -tokens.advantage * jnp.minimum(ratio, largest) * tokens.logp
    return PolicyLoss(
        jnp.where(far, 0.0, loss), indicator(far), indicator((ratio > largest) & ~far)
    )


def dppo_tv(
    tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float
) -> PolicyLoss:
    """DPPO with the binary total variation: -A sg(min(r, c)) logp, c = `dual_clip`, where allowed.

    A token has no loss where p - p_old > high with A > 0, or p_old - p > low otherwise, for the
    probabilities p of both policies: their distance is bounded, not their ratio r. Qi et al. 2026
    (arxiv.org/abs/2602.04879), sec. 4; named as in verl.
    """
    rise = jnp.exp(_log_prob(tokens.logp)) - jnp.exp(_log_prob(tokens.old_logp))
    return _dppo(tokens, rise > clip_high, rise < -clip_low, dual_clip)


def dppo_kl(
    tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float
) -> PolicyLoss:
    """DPPO with the binary KL: dppo_tv with p_old log(p_old / p) + (1 - p_old) log((1 - p_old) /
    (1 - p)) as the distance.

    A token has no loss where that is above high with A > 0 and p > p_old, or above low with A <= 0
    and p < p_old. 1e-8 is added to 1 - p and 1 - p_old, as in verl. Qi et al. 2026
    (arxiv.org/abs/2602.04879), sec. 4.
    """
    logp, old = _log_prob(tokens.logp), _log_prob(tokens.old_logp)
    p, p_old = jnp.exp(logp), jnp.exp(old)
    # expm1: 1 - p of a likely token has no digits left in float32
    others, others_old = -jnp.expm1(logp), -jnp.expm1(old)
    kl = p_old * (old - logp) + others_old * jnp.log((others_old + 1e-8) / (others + 1e-8))
    return _dppo(tokens, (kl > clip_high) & (p > p_old), (kl > clip_low) & (p < p_old), dual_clip)


def _log_prob(logp: jax.Array) -> jax.Array:
    # rounding may leave the log-prob of a certain token above 0
    return jnp.minimum(jax.lax.stop_gradient(logp), 0.0)


def gpg(tokens: PolicyTokens) -> PolicyLoss:
    """GPG: -logp A, the plain policy gradient. Chu et al. 2025 (arxiv.org/abs/2504.02546)."""
    return _unclipped(-tokens.logp * tokens.advantage)


def cpgd(
    tokens: PolicyTokens, *, clip_low: float, clip_high: float, cpgd_drift_coef: float
) -> PolicyLoss:
    """CPGD: -u A + coef min(exp(sg(logp) - old) - 1, 2) logp.

    u = min(logp, old + log(1 + high)) for A > 0, else max(logp, old + log(1 - low)). No ratio
    enters the gradient; the second term penalises drift from the old policy. Liu et al. 2025
    (arxiv.org/abs/2505.12504).
    """
    logp, old = tokens.logp, tokens.old_logp
    upper, lower = old + jnp.log1p(clip_high), old + jnp.log1p(-clip_low)
    bounded = jnp.where(tokens.advantage > 0, jnp.minimum(logp, upper), jnp.maximum(logp, lower))
    d = jnp.minimum(jax.lax.stop_gradient(logp) - old, MAX_LOG_RATIO)
    drift = jnp.minimum(jnp.expm1(d), 2.0) * logp
    loss = -bounded * tokens.advantage + cpgd_drift_coef * drift
    return PolicyLoss(loss, indicator(bounded != logp), jnp.zeros_like(loss))


def kl_cov(tokens: PolicyTokens, *, kl_cov_coef: float) -> PolicyLoss:
    """KL-Cov: -A r, plus coef |logp - old| on the tokens chosen by select_kl_cov.

    Cui et al. 2025 (arxiv.org/abs/2505.22617), sec. 4.
    """
    distance = absolute(tokens.logp, tokens.old_logp)
    penalty = jnp.where(tokens.selected, kl_cov_coef * distance, 0.0)
    ratio = ratio_of(tokens.logp - tokens.old_logp)
    return _unclipped(-tokens.advantage * ratio + penalty)


def clip_cov(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Clip-Cov: max(-A r, -A clip(r, 1 - low, 1 + high)), 0 on tokens chosen by select_clip_cov.

    No dual clip. Cui et al. 2025 (arxiv.org/abs/2505.22617), sec. 4; named as in verl, where
    pg_clipfrac, too, is the share of chosen tokens.
    """
    ratio = ratio_of(tokens.logp - tokens.old_logp)
    loss, _ = clipped_surrogate(ratio, tokens.advantage, clip_low, clip_high)
    loss = jnp.where(tokens.selected, 0.0, loss)
    return PolicyLoss(loss, indicator(tokens.selected), jnp.zeros_like(loss))


def dro(tokens: PolicyTokens, *, dro_beta: float) -> PolicyLoss:
    """DRO: -(logp A - (beta / 2) (logp - old)^2).

    Richemond et al. 2024 (arxiv.org/abs/2405.19107).
    """
    square = jnp.square(tokens.logp - tokens.old_logp)
    return _unclipped(-(tokens.logp * tokens.advantage - 0.5 * dro_beta * square))


def decoupled(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Decoupled PPO: -min(u A, clip(u) A), u = exp(logp - prox), with prox in `old_logp`.

    To be weighted by the correction of the proximal policy against the sampler.
    Hilton et al. 2022 (arxiv.org/abs/2110.00641); Fu et al. 2025 (AReaL,
    arxiv.org/abs/2505.24298).
    """
    ratio = ratio_of(tokens.logp - tokens.old_logp)
    loss, clipped = clipped_surrogate(ratio, tokens.advantage, clip_low, clip_high)
    return PolicyLoss(loss, indicator(clipped), jnp.zeros_like(loss))


LOSSES: dict[str, Callable[..., PolicyLoss]] = {  # f(tokens, **options)
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gpg": gpg,
    "cpgd": cpgd,
    "kl_cov": kl_cov,
    "clip_cov": clip_cov,
    "dro": dro,
    "decoupled": decoupled,
}
# of the losses that choose tokens: f(tokens, **select_options) -> mask
SELECTIONS: dict[str, Callable[..., jax.Array]] = {
    "kl_cov": select_kl_cov,
    "clip_cov": select_clip_cov,
}
