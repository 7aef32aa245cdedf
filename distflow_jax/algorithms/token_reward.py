"""Token rewards: a response's score at its last token, less a KL penalty on every token.

K mini-batches, R rows, L tokens per row, S sequences per row.
"""

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.masked import masked_mean
from distflow_jax.algorithms.packed import counted, is_last, per_token, sequence_mean
from distflow_jax.batch import Rows


def token_rewards(score: jax.Array, rows: Rows) -> jax.Array:
    """Rewards float32 [K, R, L]: the score [K, R, S] at each response's last token, 0 elsewhere.

    The last token is the last one that the policy chose; a response without one has no reward.
    """
    return jnp.where(is_last(rows), per_token(score, rows.segment), 0.0)


def with_kl_penalty(
    reward: jax.Array, kl: jax.Array, rows: Rows, coef: jax.Array | float
) -> jax.Array:
    """Rewards R_t - coef kl_t on response tokens, [K, R, L]; 0 elsewhere.

    `reward` and `kl`, by any of kl.KL_ESTIMATORS, are [K, R, L].
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
