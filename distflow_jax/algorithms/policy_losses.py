"""Per-token policy losses. Arguments are [R, L]; aggregation is somebody else's (aggregate.py)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class PolicyLoss(NamedTuple):
    """Per-token loss and the indicators behind verl's clip metrics, all [R, L] float32."""

    loss: jax.Array
    clipped: jax.Array  # 1 where the clipped branch is the larger one
    clipped_lower: jax.Array  # 1 where the dual clip is active
    log_ratio: jax.Array  # logp - old


def ppo_clip(
    logp: jax.Array,
    old_logp: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A c (dual clip, c > 1).

    r = exp(clip(logp - old, -20, 20)). Schulman et al. 2017 (arxiv.org/abs/1707.06347), eq. 7; two
    bounds: Yu et al. 2025 (arxiv.org/abs/2503.14476), eq. 5; dual clip: Ye et al. 2020
    (arxiv.org/abs/1912.09729), eq. 5. Values outside the mask do not matter.
    """
    # where before exp: a masked inf would give 0 * inf = nan in the gradient
    log_ratio = jnp.where(mask, logp - old_logp, 0.0)
    advantage = jnp.where(mask, advantage, 0.0)
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    plain = -advantage * ratio
    clipped = -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(plain, clipped)
    floor = -advantage * dual_clip
    negative = advantage < 0
    lower = negative & (loss > floor)
    loss = jnp.where(negative, jnp.minimum(loss, floor), loss)
    return PolicyLoss(
        loss,
        (clipped > plain).astype(jnp.float32),
        lower.astype(jnp.float32),
        log_ratio,
    )


POLICY_LOSSES = {"ppo_clip": ppo_clip}
