"""Rewards of tokens: a response's score at its end, a KL penalty on every token.

K mini-batches, R rows, L tokens per row, S sequences per row.
"""

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.masked import masked_mean
from distflow_jax.algorithms.packed import counted, is_last, per_token, sequence_mean
from distflow_jax.batch import Rows


def token_rewards(score: jax.Array, rows: Rows) -> jax.Array:
    """The score [K, R, S] at the last token of each response that the policy chose, 0 elsewhere;
    float32 [K, R, L]. A response without such a token has no reward."""
    return jnp.where(is_last(rows), per_token(score, rows.segment), 0.0)


def with_kl_penalty(
    reward: jax.Array, kl: jax.Array, rows: Rows, coef: jax.Array | float
) -> jax.Array:
    """R_t - coef kl_t on response tokens, [K, R, L]; `kl` is any estimate of kl.KL_ESTIMATORS.

    Ziegler et al. 2019 (arxiv.org/abs/1909.08593), eq. 2.
    """
    return jnp.where(rows.response_mask, reward - coef * kl, 0.0)


def mean_kl(kl: jax.Array, rows: Rows) -> jax.Array:
    """Mean over the responses of the mean over each one's tokens: what the controller steers by."""
    return masked_mean(sequence_mean(kl, rows), counted(rows))


def adapted_coef(
    coef: jax.Array, kl: jax.Array, num_sequences: jax.Array, *, target: float, horizon: float
) -> jax.Array:
    """coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon): the coefficient of the next step.

    `kl` as of mean_kl, nats; `target` nats; `horizon` sequences. Ziegler et al. 2019
    (arxiv.org/abs/1909.08593), sec. 2.2.
    """
    error = jnp.clip(kl / target - 1.0, -0.2, 0.2)
    return coef * (1.0 + error * num_sequences / horizon)
