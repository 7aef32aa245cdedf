"""Tokens chosen by the covariance of advantage and log-prob, for the losses kl_cov and clip_cov.

C = (A - mean A) (logp - mean logp) of a token, with means over the optimizer step, whose rows the
arguments hold, and logp of the current policy, without a gradient. Cui et al. 2025
(arxiv.org/abs/2505.22617), sec. 4. R rows, L tokens per row.
"""

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.masked import masked_count, masked_mean, without_offset
from distflow_jax.algorithms.packed import per_token, rank
from distflow_jax.algorithms.policy_tokens import PolicyTokens, clipped_surrogate, ratio_of


def covariance(tokens: PolicyTokens) -> jax.Array:
    """C of each token, float32 [R, L] without a gradient; without a meaning outside the mask."""
    mask = tokens.rows.response_mask
    product = jnp.ones_like(tokens.advantage)
    for x in (tokens.advantage, jax.lax.stop_gradient(tokens.logp)):
        x = without_offset(x, mask)
        product = product * (x - masked_mean(x, mask))
    return product


def select_kl_cov(tokens: PolicyTokens, *, kl_cov_share: float) -> jax.Array:
    """Mask of the max(1, floor(share N)) response tokens with the largest C of N, bool [R, L].

    Ties are broken by (group, member, position), so the choice does not depend on packing.
    """
    mask = tokens.rows.response_mask
    keys = (jnp.where(mask, -covariance(tokens), jnp.inf), *_places(tokens))
    return mask & _first(keys, _number(kl_cov_share, mask))


def select_clip_cov(
    tokens: PolicyTokens,
    *,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """Mask of max(1, floor(ratio N)) random tokens among those with lb < C < ub, bool [R, L].

    N counts response tokens. Tokens that the clip holds already are left out, and where fewer than
    that number remain, all of them are chosen. The noise depends on the step's tokens and on
    (group, member, position), so the choice is the same in any packing and on any mesh.
    """
    rows, mask = tokens.rows, tokens.rows.response_mask
    ratio = ratio_of(tokens.logp - tokens.old_logp)
    _, clipped = clipped_surrogate(ratio, tokens.advantage, clip_low, clip_high)
    c = covariance(tokens)
    candidate = mask & ~clipped & (c > clip_cov_lb) & (c < clip_cov_ub)
    places = _places(tokens)
    # a sum of uint32, which wraps around: equal however the tokens are divided over devices
    content = (rows.tokens + 1).astype(jnp.uint32) * (rows.position + 1).astype(jnp.uint32)
    key = jax.random.key(jnp.sum(jnp.where(mask, content, jnp.uint32(0)), dtype=jnp.uint32))

    def noise(*place):
        mine = key
        for number in place:
            mine = jax.random.fold_in(mine, number)
        return jax.random.bits(mine)

    drawn = jax.vmap(noise)(*(x.reshape(-1) for x in places)).reshape(mask.shape)
    keys = ((~candidate).astype(jnp.int32), drawn, *places)
    return candidate & _first(keys, _number(clip_cov_ratio, mask))


def _places(tokens: PolicyTokens) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(group, member, position) of each token, int32 [R, L] each."""
    rows = tokens.rows
    return *(per_token(x, rows.segment) for x in (rows.group, rows.member)), rows.position


def _number(share: float, mask: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.floor(share * masked_count(mask)), 1.0).astype(jnp.int32)


def _first(keys: tuple[jax.Array, ...], number: jax.Array) -> jax.Array:
    """Mask of the first `number` tokens in the order of the keys [R, L], over all rows."""
    return rank(*(key.reshape(-1) for key in keys)).reshape(keys[0].shape) < number
