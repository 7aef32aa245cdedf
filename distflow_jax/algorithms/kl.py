"""KL(policy || reference): per-token estimators, its penalty on rewards, and its coefficient.

Estimators with D = logp - ref: Schulman 2020, "Approximating KL divergence"
(joschu.net/blog/kl-approx.html); their arguments and results are float32 of any equal shape.
K mini-batches, R rows, L tokens per row, S sequences per row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.masked import masked_mean
from distflow_jax.algorithms.packed import counted, is_last, per_token, sequence_mean
from distflow_jax.batch import Rows


def k1(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """D, any shape. Unbiased; the expectation of its gradient as a loss is zero."""
    return logp - ref_logp


def absolute(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """|D|, any shape, with gradient 0 where D is 0."""
    d = logp - ref_logp
    # the gradient of jnp.abs at 0 is 1, which would push equal policies to one side
    return d * jax.lax.stop_gradient(jnp.sign(d))


def k2(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """D^2 / 2, any shape."""
    return 0.5 * jnp.square(logp - ref_logp)


def k3(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """exp(-D) + D - 1, any shape, never negative; D is clipped to +-20, the result to +-10."""
    d = jnp.clip(logp - ref_logp, -20.0, 20.0)
    # expm1: exp(-D) - 1 + D cancels all digits for small D
    return jnp.clip(jnp.expm1(-d) + d, -10.0, 10.0)


def k1_plus(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """Value of k1 with the gradient of k2 (straight-through), any shape.

    The expectations of value and gradient are those of the true KL. Named as in verl, whose "+"
    joins the gradient of k2 to any estimator.
    """
    straight = k2(logp, ref_logp)
    return straight + jax.lax.stop_gradient(k1(logp, ref_logp) - straight)


def k3_plus(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """Value of k3 with the gradient of k2 (straight-through), any shape.

    The expectation of the gradient is that of the true KL.
    """
    straight = k2(logp, ref_logp)
    return straight + jax.lax.stop_gradient(k3(logp, ref_logp) - straight)


KL_ESTIMATORS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": k1_plus,
    "k3+": k3_plus,
}


def token_rewards(score: jax.Array, rows: Rows) -> jax.Array:
    """Rewards float32 [K, R, L]: the score [K, R, S] at each response's last token, 0 elsewhere.

    The last token is the last one that the policy chose; a response without one has no reward.
    """
    return jnp.where(is_last(rows), per_token(score, rows.segment), 0.0)


def with_kl_penalty(
    reward: jax.Array, kl: jax.Array, rows: Rows, coef: jax.Array | float
) -> jax.Array:
    """Rewards R_t - coef kl_t on response tokens, [K, R, L]; 0 elsewhere.

    `reward` and `kl`, by any of KL_ESTIMATORS, are [K, R, L].
    Ziegler et al. 2019 (arxiv.org/abs/1909.08593), eq. 2.
    """
    return jnp.where(rows.response_mask, reward - coef * kl, 0.0)


def mean_kl(kl: jax.Array, rows: Rows) -> jax.Array:
    """Mean over responses of the mean KL of each one's tokens, a scalar from kl [K, R, L].

    The input of the KL controller, see adapted_coef.
    """
    return masked_mean(sequence_mean(kl, rows), counted(rows))


def adapted_coef(
    coef: jax.Array, kl: jax.Array, num_sequences: jax.Array, *, target: float, horizon: float
) -> jax.Array:
    """Next step's KL coefficient coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), a scalar.

    `kl` is the result of mean_kl and `target` its goal, both in nats; `horizon` counts sequences.
    Ziegler et al. 2019 (arxiv.org/abs/1909.08593), sec. 2.2.
    """
    error = jnp.clip(kl / target - 1.0, -0.2, 0.2)
    return coef * (1.0 + error * num_sequences / horizon)
