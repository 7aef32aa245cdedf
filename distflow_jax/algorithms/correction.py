"""Off-policy correction: weights for the gap between the sampler's and the trainer's probabilities.

rho = exp(prox - roll): the proximal policy (the trainer's, at the start of the optimizer step) over
the policy that sampled the tokens. All thresholds apply to this ratio, trainer over rollout. R
rows, L tokens per row, S sequences per row. Weights carry no gradient and do not change the
denominator of the loss.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.algorithms.masked import masked_mean
from distflow_jax.algorithms.packed import (
    counted,
    per_sequence,
    per_token,
    sequence_max,
    sequence_mean,
)
from distflow_jax.algorithms.policy_tokens import MAX_LOG_RATIO, cleaned_logp, ratio_of
from distflow_jax.batch import Rows
from distflow_jax.config.algorithm_tables import CorrectionKind


class Correction(NamedTuple):
    """Weights of tokens; 0 outside response_mask."""

    weight: jax.Array  # float32 [R, L]
    changed: jax.Array  # bool [R, L]: the ratio was out of bounds and was cut or set to 0


def log_rho(prox_logp: jax.Array, rollout_logp: jax.Array, rows: Rows) -> jax.Array:
    """log rho [R, L] without a gradient; 0 outside response_mask, even for inf or nan inputs."""
    prox, rollout = (cleaned_logp(x, rows.response_mask) for x in (prox_logp, rollout_logp))
    return jax.lax.stop_gradient(prox - rollout)


def _bounded(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k2(log_ratio: jax.Array) -> jax.Array:
    return 0.5 * jnp.square(_bounded(log_ratio))


def _k3(log_ratio: jax.Array) -> jax.Array:
    # expm1: rho - 1 - log rho cancels all digits for rho near 1
    return jnp.expm1(_bounded(log_ratio)) - _bounded(log_ratio)


def _on_tokens(rows: Rows, weight: jax.Array, changed: jax.Array) -> Correction:
    mask = rows.response_mask
    return Correction(jnp.where(mask, weight, 0.0), mask & changed)


def _sequence_rho(log_ratio: jax.Array, rows: Rows) -> jax.Array:
    """Product of rho over each sequence, spread over its tokens, [R, L]."""
    return per_token(ratio_of(per_sequence(log_ratio, rows)), rows.segment)


def token_tis(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """Truncated importance sampling: min(rho, high), for log_ratio = log rho [R, L].

    Yao et al. 2025 (fengyao.notion.site, "Your efficient RL framework secretly brings you
    off-policy RL training").
    """
    rho = ratio_of(log_ratio)
    return _on_tokens(rows, jnp.minimum(rho, high), rho > high)


def token_mis(log_ratio: jax.Array, rows: Rows, *, low: float, high: float) -> Correction:
    """Masked importance sampling: rho where low <= rho <= high, else 0; log_ratio = log rho [R, L].

    IcePop, Ling team 2025 (ringtech.notion.site/icepop).
    """
    rho = ratio_of(log_ratio)
    kept = (rho >= low) & (rho <= high)
    return _on_tokens(rows, jnp.where(kept, rho, 0.0), ~kept)


def sequence_tis(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """Truncated importance sampling per sequence: min(prod rho, high); log_ratio = log rho [R, L].

    All tokens of a sequence have the same weight.
    """
    rho = _sequence_rho(log_ratio, rows)
    return _on_tokens(rows, jnp.minimum(rho, high), rho > high)


def sequence_mis(log_ratio: jax.Array, rows: Rows, *, low: float, high: float) -> Correction:
    """Masked importance sampling per sequence: prod rho where low <= prod rho <= high, else 0.

    log_ratio = log rho [R, L]. Liu, Li et al. 2025 ("When speed kills stability",
    yingru.notion.site), with the lower bound of verl's "lower_upper".
    """
    rho = _sequence_rho(log_ratio, rows)
    kept = (rho >= low) & (rho <= high)
    return _on_tokens(rows, jnp.where(kept, rho, 0.0), ~kept)


def _keep(rows: Rows, kept: jax.Array) -> Correction:
    kept = per_token(kept, rows.segment)
    return _on_tokens(rows, kept.astype(jnp.float32), ~kept)


def geometric(log_ratio: jax.Array, rows: Rows, *, low: float, high: float) -> Correction:
    """1 on sequences with low <= exp(mean log rho) <= high, else 0; log_ratio = log rho [R, L]."""
    mean = ratio_of(sequence_mean(log_ratio, rows))
    return _keep(rows, (mean >= low) & (mean <= high))


def k2_rejection(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """1 on sequences with mean((log rho)^2) / 2 <= high, else 0; log_ratio = log rho [R, L]."""
    return _keep(rows, sequence_mean(_k2(log_ratio), rows) <= high)


def k3_rejection(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """1 on sequences with mean(rho - 1 - log rho) <= high, else 0; log_ratio = log rho [R, L]."""
    return _keep(rows, sequence_mean(_k3(log_ratio), rows) <= high)


def _keep_tokens(rows: Rows, kept: jax.Array) -> Correction:
    return _on_tokens(rows, kept.astype(jnp.float32), ~kept)


def token_k1(log_ratio: jax.Array, rows: Rows, *, low: float, high: float) -> Correction:
    """1 on tokens with low <= rho <= high, else 0; log_ratio = log rho [R, L].

    The names token_*, seq_sum_* and seq_max_* are verl's (rollout_rs), whose bounds of k1 apply to
    1 / rho. k1, k2, k3: Schulman 2020 (joschu.net/blog/kl-approx.html), of the KL from
    the sampler's to the trainer's policy.
    """
    rho = ratio_of(log_ratio)
    return _keep_tokens(rows, (rho >= low) & (rho <= high))


def token_k2(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """1 on tokens with (log rho)^2 / 2 <= high, else 0; log_ratio = log rho [R, L]."""
    return _keep_tokens(rows, _k2(log_ratio) <= high)


def token_k3(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """1 on tokens with rho - 1 - log rho <= high, else 0; log_ratio = log rho [R, L]."""
    return _keep_tokens(rows, _k3(log_ratio) <= high)


def seq_sum_k1(log_ratio: jax.Array, rows: Rows, *, low: float, high: float) -> Correction:
    """1 on sequences with low <= prod rho <= high, else 0; log_ratio = log rho [R, L]."""
    product = ratio_of(per_sequence(_bounded(log_ratio), rows))
    return _keep(rows, (product >= low) & (product <= high))


def seq_sum_k2(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """1 on sequences with sum((log rho)^2) / 2 <= high, else 0; log_ratio = log rho [R, L]."""
    return _keep(rows, per_sequence(_k2(log_ratio), rows) <= high)


def seq_sum_k3(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """1 on sequences with sum(rho - 1 - log rho) <= high, else 0; log_ratio = log rho [R, L]."""
    return _keep(rows, per_sequence(_k3(log_ratio), rows) <= high)


def seq_max_k2(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """1 on sequences with max((log rho)^2) / 2 <= high, else 0; log_ratio = log rho [R, L].

    One token far off leaves out its sequence: Li et al. 2026 ("Trust region masking").
    """
    return _keep(rows, sequence_max(_k2(log_ratio), rows) <= high)


def seq_max_k3(log_ratio: jax.Array, rows: Rows, *, high: float) -> Correction:
    """1 on sequences with max(rho - 1 - log rho) <= high, else 0; log_ratio = log rho [R, L]."""
    return _keep(rows, sequence_max(_k3(log_ratio), rows) <= high)


# f(log_rho, rows, **bounds): the corrections, then the rejections
WEIGHTS: dict[str, Callable[..., Correction]] = {
    "token_tis": token_tis,
    "token_mis": token_mis,
    "sequence_tis": sequence_tis,
    "sequence_mis": sequence_mis,
    "geometric": geometric,
    "k2": k2_rejection,
    "k3": k3_rejection,
    "token_k1": token_k1,
    "token_k2": token_k2,
    "token_k3": token_k3,
    "seq_sum_k1": seq_sum_k1,
    "seq_sum_k2": seq_sum_k2,
    "seq_sum_k3": seq_sum_k3,
    "seq_max_k2": seq_max_k2,
    "seq_max_k3": seq_max_k3,
}


def mean_weight(kind: CorrectionKind, weight: jax.Array, rows: Rows) -> jax.Array:
    """Mean weight [R, L] of a correction, by which batch normalisation divides it; a scalar.

    Of all response tokens, or of all sequences where the weights are those of sequences. 1 where
    the mean is below 1e-8. verl's rollout_is_batch_normalize: self-normalised importance sampling.
    """
    if kind.per_sequence:
        mean = masked_mean(sequence_mean(weight, rows), counted(rows))
    else:
        mean = masked_mean(weight, rows.response_mask)
    return jnp.where(mean > 1e-8, mean, 1.0)


def geometric_mean(weight: jax.Array, rows: Rows) -> jax.Array:
    """Geometric mean over each sequence of its weights + 1e-10, on all of its tokens, [R, L].

    For losses of whole sequences. 1e-10 is verl's: a few tokens of weight 0 leave their sequence a
    small weight. A sequence whose weights are all 0 has 0.
    """
    mean = jnp.exp(sequence_mean(jnp.log(weight + 1e-10), rows))
    mean = jnp.where(sequence_max(weight, rows) > 0, mean, 0.0)
    return jnp.where(rows.response_mask, per_token(mean, rows.segment), 0.0)


def rejected_sequences(rejection: Correction, rows: Rows) -> jax.Array:
    """Sequences that a rejection leaves out, bool [R, S]."""
    return counted(rows) & (per_sequence(rejection.changed.astype(jnp.int32), rows) > 0)


# -- the proximal policy ---------------------------------------------------------------------------


def a3po_alpha(age: np.ndarray, proximal_age: int) -> np.ndarray:
    """A-3PO's interpolation weight (v_prox - v_b) / (v - v_b), shaped as `age`, of any shape.

    `age`, a float32 count of steps, is that of the weights v_b that sampled a token; those before
    the update have age 0. The current policy v is one version after the proximal one v_prox, which
    has `proximal_age`. A token that v_prox or newer weights sampled has weight 0: the sampler's own
    policy is its proximal one.
    """
    since = (age - proximal_age).clip(0)
    return since / (since + 1)


def a3po_proximal(logp: jax.Array, rollout_logp: jax.Array, alpha: jax.Array) -> jax.Array:
    """Proximal log-probs roll + alpha (logp - roll), without a gradient or a forward pass, [R, L].

    A-3PO ("staleness-aware proximal policy approximation", 2025). All arguments are [R, L].
    """
    return jax.lax.stop_gradient(rollout_logp + alpha * (logp - rollout_logp))
