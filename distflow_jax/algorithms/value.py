"""The critic's loss, and how much of the returns it explains. Any shape, float32."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.aggregate import AGGREGATIONS
from distflow_jax.algorithms.masked import masked_variance, safe_divide


@dataclasses.dataclass(frozen=True)
class ValueConfig:
    """How a critic is trained."""

    clip: float = 0.5  # a value may leave the old one by this before its gain counts no more
    aggregation: str = "token-mean"

    def __post_init__(self):
        if self.clip <= 0:
            raise ValueError(f"critic.loss.clip must be positive, got {self.clip}")
        # a budget is one of the policy's loss: the critic has no use for a cut response
        choices = sorted(set(AGGREGATIONS) - {"fixed-budget"})
        if self.aggregation not in choices:
            raise ValueError(
                f"critic.loss.aggregation={self.aggregation!r} is unknown; choose one of {choices}"
            )


class ValueLoss(NamedTuple):
    """Per-token loss, and 1 where the clipped branch is the larger one."""

    loss: jax.Array
    clipped: jax.Array


def value_loss(
    value: jax.Array, old_value: jax.Array, returns: jax.Array, mask: jax.Array, *, clip: float
) -> ValueLoss:
    """0.5 max((v - G)^2, (clip(v, V - c, V + c) - G)^2), V the value before the step's updates.

    0 outside the mask, whatever stands there. Schulman et al., PPO2 in OpenAI Baselines; Engstrom
    et al. 2020 (arxiv.org/abs/2005.12729), sec. 3.
    """
    value, old_value, returns = (jnp.where(mask, x, 0.0) for x in (value, old_value, returns))
    bounded = jnp.clip(value, old_value - clip, old_value + clip)
    plain, clipped = jnp.square(value - returns), jnp.square(bounded - returns)
    return ValueLoss(0.5 * jnp.maximum(plain, clipped), (clipped > plain).astype(jnp.float32))


def explained_variance(value: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """1 - Var(G - V) / Var(G) over the mask: 1 is perfect, 0 no better than a constant.

    0 where the returns do not vary.
    """
    total = masked_variance(returns, mask)
    left = masked_variance(jnp.where(mask, returns - value, 0.0), mask)
    return jnp.where(total > 0, 1.0 - safe_divide(left, total), 0.0)
