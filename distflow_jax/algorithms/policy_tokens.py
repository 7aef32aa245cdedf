"""Arguments of a policy loss and the ratio of two policies.

R rows, L tokens per row, S sequences per row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

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
