"""Weights that correct for a sampler whose probabilities are not the trainer's.

rho = exp(prox - roll): the proximal policy (the trainer's, at the start of the optimizer step) over
the sampler that chose the tokens. Thresholds are always on this ratio, train over rollout. R rows,
L tokens per row. Weights carry no gradient, and do not change what a loss is divided by.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.packed import counted, per_sequence, per_token, sequence_mean
from distflow_jax.batch import Rows

MAX_LOG_RHO = 20.0


class Correction(NamedTuple):
    """A weight per token; 0 outside response_mask."""

    weight: jax.Array  # float32 [R, L]
    changed: jax.Array  # bool [R, L]: the ratio was out of bounds, and cut or set to 0


def log_rho(prox_logp: jax.Array, rollout_logp: jax.Array, rows: Rows) -> jax.Array:
    """log rho without a gradient, [R, L]; 0 outside response_mask, whatever stands there."""
    difference = jnp.where(rows.response_mask, prox_logp - rollout_logp, 0.0)
    return jax.lax.stop_gradient(difference)


def _exp(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(x, -MAX_LOG_RHO, MAX_LOG_RHO))


def _on_tokens(rows: Rows, weight: jax.Array, changed: jax.Array) -> Correction:
    mask = rows.response_mask
    return Correction(jnp.where(mask, weight, 0.0), mask & changed)


def _sequence_rho(log_ratio: jax.Array, rows: Rows) -> jax.Array:
    """Product of rho over the sequence, on each of its tokens."""
    return per_token(_exp(per_sequence(log_ratio, rows)), rows.segment)


def token_tis(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """min(rho, C): truncated importance sampling. Yao et al. 2025 (fengyao.notion.site,
    "Your efficient RL framework secretly brings you off-policy RL training")."""
    rho = _exp(log_ratio)
    return _on_tokens(rows, jnp.minimum(rho, high), rho > high)


def token_mis(log_ratio: jax.Array, rows: Rows, *, low: float, high: float) -> Correction:
    """rho where low <= rho <= high, else 0: masked importance sampling (IcePop, Ling team 2025,
    ringtech.notion.site/icepop)."""
    rho = _exp(log_ratio)
    kept = (rho >= low) & (rho <= high)
    return _on_tokens(rows, jnp.where(kept, rho, 0.0), ~kept)


def sequence_tis(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """min(prod rho, C), one weight for the whole sequence."""
    rho = _sequence_rho(log_ratio, rows)
    return _on_tokens(rows, jnp.minimum(rho, high), rho > high)


def sequence_mis(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """prod rho where it is at most C, else 0. Liu, Li et al. 2025 ("When speed kills stability",
    yingru.notion.site)."""
    rho = _sequence_rho(log_ratio, rows)
    kept = rho <= high
    return _on_tokens(rows, jnp.where(kept, rho, 0.0), ~kept)


def _keep(rows: Rows, kept: jax.Array) -> Correction:
    kept = per_token(kept, rows.segment)
    return _on_tokens(rows, kept.astype(jnp.float32), ~kept)


def geometric(log_ratio: jax.Array, rows: Rows, *, low: float, high: float) -> Correction:
    """1 on sequences with low <= exp(mean log rho) <= high, else 0."""
    mean = _exp(sequence_mean(log_ratio, rows))
    return _keep(rows, (mean >= low) & (mean <= high))


def k2_rejection(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """1 on sequences whose mean of (log rho)^2 / 2 is at most c, else 0."""
    return _keep(rows, sequence_mean(0.5 * jnp.square(log_ratio), rows) <= high)


def k3_rejection(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """1 on sequences whose mean of rho - 1 - log rho is at most c, else 0."""
    bounded = jnp.clip(log_ratio, -MAX_LOG_RHO, MAX_LOG_RHO)
    # expm1: rho - 1 - log rho cancels all digits for rho near 1
    return _keep(rows, sequence_mean(jnp.expm1(bounded) - bounded, rows) <= high)


@dataclasses.dataclass(frozen=True)
class CorrectionKind:
    """correct(log rho, rows, **bounds) -> Correction, and the bounds' defaults."""

    correct: Callable[..., Correction]
    bounds: Mapping[str, float]


# weights by the ratio itself; one may be combined with one of REJECTIONS
CORRECTIONS: dict[str, CorrectionKind] = {
    "token_tis": CorrectionKind(token_tis, {"high": 2.0}),
    "token_mis": CorrectionKind(token_mis, {"low": 0.5, "high": 5.0}),
    "sequence_tis": CorrectionKind(sequence_tis, {"high": 2.0}),
    "sequence_mis": CorrectionKind(sequence_mis, {"high": 2.0}),
}

# 0 or 1: whole sequences that the sampler drew from too different a policy are left out
REJECTIONS: dict[str, CorrectionKind] = {
    "geometric": CorrectionKind(geometric, {"low": 0.99, "high": 1.01}),
    "k2": CorrectionKind(k2_rejection, {"high": 0.01}),
    "k3": CorrectionKind(k3_rejection, {"high": 0.01}),
}


def rejected_sequences(rejection: Correction, rows: Rows) -> jax.Array:
    """Sequences that a rejection leaves out, bool [R, S]."""
    return counted(rows) & (per_sequence(rejection.changed.astype(jnp.int32), rows) > 0)


# -- the proximal policy ---------------------------------------------------------------------------

# recomputed: the trainer's own forward pass before the update (or, with one update per batch, the
# policy itself); rollout: the sampler's log-probs (bypass: the ratio of the loss then corrects all)
PROXIMAL = ("recomputed", "rollout", "a3po")


def a3po_alpha(
    version: jax.Array, current: jax.Array | int, proximal: jax.Array | int
) -> jax.Array:
    """(v_prox - v_b) / (v - v_b), float32 as `version` (int32, v_b: which weights sampled a token).

    `current` v is the version being trained, `proximal` the one at the start of the step. 0, the
    sampler's policy itself, where a token is as new as the current version.
    """
    gap = (current - version).astype(jnp.float32)
    share = (proximal - version).astype(jnp.float32) / jnp.where(gap > 0, gap, 1.0)
    return jnp.where(gap > 0, jnp.clip(share, 0.0, 1.0), 0.0)


def a3po_proximal(logp: jax.Array, rollout_logp: jax.Array, alpha: jax.Array) -> jax.Array:
    """roll + alpha (logp - roll), without a gradient: a proximal policy that costs no forward pass.

    A-3PO ("staleness-aware proximal policy approximation", 2025); all arguments [R, L].
    """
    return jax.lax.stop_gradient(rollout_logp + alpha * (logp - rollout_logp))
