"""Statistics of groups: all responses to one prompt, in any rows of a step.

G groups. `score` float32, `group` int32 in [0, G) and `valid` bool have equal shapes of any rank,
e.g. [K, R, S]. Values where `valid` is False are ignored.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class GroupStatistics(NamedTuple):
    """Statistics of the valid sequences of each group, float32 [G]."""

    count: jax.Array
    mean: jax.Array
    squares: jax.Array  # sum of squared deviations from the mean
    equal: jax.Array  # bool: all scores are the same number; True for an empty group


def group_sum(x: jax.Array, group: jax.Array, num_groups: int) -> jax.Array:
    """Sum of x over each group, [G]."""
    return jax.ops.segment_sum(x.reshape(-1), group.reshape(-1), num_segments=num_groups)


def group_extremes(
    x: jax.Array, group: jax.Array, valid: jax.Array, num_groups: int
) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest x of each group, [G] each; (inf, -inf) for an empty group."""
    flat = group.reshape(-1)
    low = jnp.where(valid, x, jnp.inf).reshape(-1)
    high = jnp.where(valid, x, -jnp.inf).reshape(-1)
    return (
        jax.ops.segment_min(low, flat, num_segments=num_groups),
        jax.ops.segment_max(high, flat, num_segments=num_groups),
    )


def group_best_two(
    score: jax.Array, group: jax.Array, valid: jax.Array, num_groups: int
) -> tuple[jax.Array, jax.Array]:
    """Largest and second largest score of each group, [G] each; equal where two are the largest.

    The second is -inf for a group of one, both are for an empty group. Arguments have any equal
    shape.
    """
    _, best = group_extremes(score, group, valid, num_groups)
    is_best = valid & (score == best[group])
    _, below = group_extremes(score, group, valid & ~is_best, num_groups)
    several = group_sum(is_best.astype(jnp.float32), group, num_groups) > 1
    return best, jnp.where(several, best, below)


def group_statistics(
    score: jax.Array, group: jax.Array, valid: jax.Array, num_groups: int
) -> GroupStatistics:
    """Count, mean and spread of each group's scores, [G]; arguments have any equal shape."""
    count = group_sum(valid.astype(jnp.float32), group, num_groups)
    mean = group_sum(jnp.where(valid, score, 0.0), group, num_groups) / jnp.maximum(count, 1.0)
    deviation = jnp.where(valid, score - mean[group], 0.0)
    squares = group_sum(deviation * deviation, group, num_groups)
    low, high = group_extremes(score, group, valid, num_groups)
    return GroupStatistics(count, mean, squares, high <= low)
