"""Per-token policy losses: their common arguments and results, and the table POLICY_LOSSES.

R rows, L tokens per row, S sequences per row. Aggregation (aggregate.py) and correction weights
(correction.py) are the same for every loss and are applied elsewhere.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.kl import absolute
from distflow_jax.algorithms.masked import masked_count, masked_mean
from distflow_jax.algorithms.packed import (
    per_token,
    rank,
    sequence_mean,
)
from distflow_jax.batch import Rows

MAX_LOG_RATIO = 20.0  # keeps exp(log ratio) finite, also in products


class PolicyTokens(NamedTuple):
    """Arguments of a policy loss, [R, L] each, 0 outside the mask; made by policy_tokens."""

    logp: jax.Array
    old_logp: jax.Array  # of the proximal policy, at the start of the optimizer step; no gradient
    advantage: jax.Array
    rows: Rows
    selected: jax.Array | None = None  # bool: tokens chosen over the whole step (`select`)


class PolicyLoss(NamedTuple):
    """Per-token loss and the indicators for verl's clip metrics, float32 [R, L] each."""

    loss: jax.Array
    clipped: jax.Array  # 1 where the clipped branch is the larger one
    clipped_lower: jax.Array  # 1 where the dual clip is active


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
    cleaned = (jnp.where(mask, x, 0.0) for x in (logp, old_logp, advantage))
    return PolicyTokens(*cleaned, rows, None if selected is None else mask & selected)


def _ratio(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _indicator(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _unclipped(loss: jax.Array) -> PolicyLoss:
    return PolicyLoss(loss, jnp.zeros_like(loss), jnp.zeros_like(loss))


def _clipped_surrogate(
    ratio: jax.Array, advantage: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and a mask where the second term is larger."""
    plain = -advantage * ratio
    clipped = -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(plain, clipped), clipped > plain


def _dual_clipped(
    ratio: jax.Array, advantage: jax.Array, clip_low: float, clip_high: float, dual_clip: float
) -> PolicyLoss:
    loss, clipped = _clipped_surrogate(ratio, advantage, clip_low, clip_high)
    floor = -advantage * dual_clip
    negative = advantage < 0
    lower = negative & (loss > floor)
    loss = jnp.where(negative, jnp.minimum(loss, floor), loss)
    return PolicyLoss(loss, _indicator(clipped), _indicator(lower))


def ppo_clip(
    tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float
) -> PolicyLoss:
    """PPO's clipped surrogate max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A c for A < 0.

    r = exp(clip(logp - old, -20, 20)); c > 1 is the dual clip. Schulman et al. 2017
    (arxiv.org/abs/1707.06347), eq. 7; two bounds: Yu et al. 2025 (arxiv.org/abs/2503.14476), eq. 5;
    dual clip: Ye et al. 2020 (arxiv.org/abs/1912.09729), eq. 5.
    """
    ratio = _ratio(tokens.logp - tokens.old_logp)
    return _dual_clipped(ratio, tokens.advantage, clip_low, clip_high, dual_clip)


def gspo(
    tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float
) -> PolicyLoss:
    """GSPO: ppo_clip with the sequence's ratio, log s = sum(logp - old) / length, at most 10.

    A token's ratio is exp(sg(log s) + logp - sg(logp)), which allows advantages that differ between
    the tokens of a sequence. Zheng et al. 2025 (arxiv.org/abs/2507.18071).
    """
    log_s = jnp.minimum(sequence_mean(tokens.logp - tokens.old_logp, tokens.rows), 10.0)
    log_s = per_token(jax.lax.stop_gradient(log_s), tokens.rows.segment)
    ratio = _ratio(log_s + (tokens.logp - jax.lax.stop_gradient(tokens.logp)))
    return _dual_clipped(ratio, tokens.advantage, clip_low, clip_high, dual_clip)


def cispo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A logp. Every token keeps a gradient.

    MiniMax 2025 (arxiv.org/abs/2506.13585).
    """
    ratio = jax.lax.stop_gradient(_ratio(tokens.logp - tokens.old_logp))
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = -bounded * tokens.advantage * tokens.logp
    return PolicyLoss(loss, _indicator(bounded != ratio), jnp.zeros_like(loss))


def sapo(tokens: PolicyTokens, *, sapo_tau_positive: float, sapo_tau_negative: float) -> PolicyLoss:
    """SAPO: -A (4 / tau) sigmoid(tau (r - 1)), a smooth form of clipping.

    tau depends on the sign of A. Gao et al. 2025 (arxiv.org/abs/2511.20347).
    """
    ratio = _ratio(tokens.logp - tokens.old_logp)
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
    loss = -sequence_mean(tokens.advantage, rows) * _ratio(sequence_mean(q, rows))
    return PolicyLoss(
        per_token(loss, rows.segment), _indicator(bounded < sign * d), jnp.zeros_like(d)
    )


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
    return PolicyLoss(loss, _indicator(bounded != logp), jnp.zeros_like(loss))


def kl_cov(tokens: PolicyTokens, *, kl_cov_coef: float) -> PolicyLoss:
    """KL-Cov: -A r, plus coef |logp - old| on the tokens chosen by select_kl_cov.

    Cui et al. 2025 (arxiv.org/abs/2505.22617).
    """
    distance = absolute(tokens.logp, tokens.old_logp)
    penalty = jnp.where(tokens.selected, kl_cov_coef * distance, 0.0)
    ratio = _ratio(tokens.logp - tokens.old_logp)
    return _unclipped(-tokens.advantage * ratio + penalty)


def select_kl_cov(tokens: PolicyTokens, *, kl_cov_share: float) -> jax.Array:
    """Mask of the tokens with the largest (A - mean A) (old - mean old) of a step, bool [R, L].

    Selects max(1, floor(share N)) of the N response tokens of the whole mini-batch, which `tokens`
    holds. Ties are broken by (group, member, position), so the choice does not depend on packing.
    """
    rows, mask = tokens.rows, tokens.rows.response_mask
    covariance = jnp.ones_like(tokens.advantage)
    for x in (tokens.advantage, tokens.old_logp):
        covariance = covariance * (x - masked_mean(x, mask))
    keys = (
        jnp.where(mask, -covariance, jnp.inf),
        per_token(rows.group, rows.segment),
        per_token(rows.member, rows.segment),
        rows.position,
    )
    place = rank(*(key.reshape(-1) for key in keys)).reshape(mask.shape)
    number = jnp.maximum(jnp.floor(kl_cov_share * masked_count(mask)), 1.0)
    return mask & (place < number.astype(jnp.int32))


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
    ratio = _ratio(tokens.logp - tokens.old_logp)
    loss, clipped = _clipped_surrogate(ratio, tokens.advantage, clip_low, clip_high)
    return PolicyLoss(loss, _indicator(clipped), jnp.zeros_like(loss))


@dataclasses.dataclass(frozen=True)
class PolicyLossKind:
    """An entry of POLICY_LOSSES: loss(tokens, **options) -> PolicyLoss.

    `options` are the keys of AlgorithmConfig that the loss takes, with its own defaults;
    `select_options` are those of its token selection. `aggregation` is its default aggregation.
    """

    loss: Callable[..., PolicyLoss]
    options: Mapping[str, float]
    aggregation: str = "token-mean"
    fixed_aggregation: bool = False  # any other aggregation would be another algorithm
    clips_log_ratio: bool = False  # clip_low bounds the log ratio, so it may be above 1
    corrected: bool = False  # requires a correction weight; without one it is ppo_clip
    select: Callable[..., jax.Array] | None = None  # token selection, once per optimizer step
    select_options: Mapping[str, float] = dataclasses.field(default_factory=dict)


_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_PER_SEQUENCE = {"aggregation": "seq-mean-token-mean", "fixed_aggregation": True}

POLICY_LOSSES: dict[str, PolicyLossKind] = {
    "ppo_clip": PolicyLossKind(ppo_clip, _CLIP | {"dual_clip": 3.0}),
    "gspo": PolicyLossKind(
        gspo, {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 3.0}, **_PER_SEQUENCE
    ),
    "cispo": PolicyLossKind(cispo, _CLIP),
    "sapo": PolicyLossKind(
        sapo, {"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05}, **_PER_SEQUENCE
    ),
    "gmpo": PolicyLossKind(
        gmpo, {"clip_low": 0.4, "clip_high": 0.4}, clips_log_ratio=True, **_PER_SEQUENCE
    ),
    "gpg": PolicyLossKind(gpg, {}),
    "cpgd": PolicyLossKind(cpgd, _CLIP | {"cpgd_drift_coef": 1e-3}),
    "kl_cov": PolicyLossKind(
        kl_cov,
        {"kl_cov_coef": 1.0},
        select=select_kl_cov,
        select_options={"kl_cov_share": 2e-4},
    ),
    "dro": PolicyLossKind(dro, {"dro_beta": 0.05}),
    "decoupled": PolicyLossKind(decoupled, _CLIP, corrected=True),
}
