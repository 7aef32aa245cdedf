"""The critic's loss and its explained variance. Arguments are float32 of any equal shape."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.aggregate import AGGREGATIONS
from distflow_jax.algorithms.masked import masked_variance, safe_divide
from distflow_jax.parsing.setting_checks import check_one_of, check_positive


@dataclasses.dataclass(frozen=True)
class ValueConfig:
    """Loss of a critic."""

    clip: float = 0.5  # distance from the old value beyond which a smaller error is ignored
    aggregation: str = "token-mean"  # as algorithm.aggregation, without fixed-budget

    def __post_init__(self):
        check_positive("critic.loss", self, "clip")
        # the token budget belongs to the policy's loss; the critic learns from whole responses
        choices = sorted(set(AGGREGATIONS) - {"fixed-budget"})
        check_one_of("critic.loss.aggregation", self.aggregation, choices)


class ValueLoss(NamedTuple):
    """Per-token loss, and a mask that is 1 where the clipped branch is the larger one."""

    loss: jax.Array
    clipped: jax.Array


def value_loss(
    value: jax.Array, old_value: jax.Array, returns: jax.Array, mask: jax.Array, *, clip: float
) -> ValueLoss:
    """Clipped value loss 0.5 max((v - G)^2, (clip(v, V - c, V + c) - G)^2), any shape.

    G are the returns, V the value before the step's updates. The loss is 0 outside the mask, even
    for inf or nan. Schulman et al., PPO2 in OpenAI Baselines; Engstrom et al. 2020
    (arxiv.org/abs/2005.12729), sec. 3.
    """
    value, old_value, returns = (jnp.where(mask, x, 0.0) for x in (value, old_value, returns))
    bounded = jnp.clip(value, old_value - clip, old_value + clip)
    plain, clipped = jnp.square(value - returns), jnp.square(bounded - returns)
    return ValueLoss(0.5 * jnp.maximum(plain, clipped), (clipped > plain).astype(jnp.float32))


def explained_variance(value: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """1 - Var(G - V) / Var(G) over the mask, a scalar; 0 if the returns do not vary.

    1 is a perfect prediction, 0 is no better than a constant.
    """
    total = masked_variance(returns, mask)
    left = masked_variance(jnp.where(mask, returns - value, 0.0), mask)
    return jnp.where(total > 0, 1.0 - safe_divide(left, total), 0.0)
