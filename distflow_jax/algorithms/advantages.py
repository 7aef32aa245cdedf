"""Advantages of group-based methods, from scores wherever the group's sequences lie.

N sequences (any shape), G groups.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def _group_sum(x: jax.Array, group: jax.Array, num_groups: int) -> jax.Array:
    return jax.ops.segment_sum(x.reshape(-1), group.reshape(-1), num_segments=num_groups)


def group_statistics(
    score: jax.Array, group: jax.Array, valid: jax.Array, num_groups: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(count, mean, sum of squared deviations, whether all scores are equal), each [G]."""
    ok = valid.astype(jnp.float32)
    count = _group_sum(ok, group, num_groups)
    mean = _group_sum(jnp.where(valid, score, 0.0), group, num_groups) / jnp.maximum(count, 1.0)
    deviation = jnp.where(valid, score - mean[group], 0.0)
    squares = _group_sum(deviation * deviation, group, num_groups)
    flat_group = group.reshape(-1)
    high = jax.ops.segment_max(
        jnp.where(valid, score, -jnp.inf).reshape(-1), flat_group, num_segments=num_groups
    )
    low = jax.ops.segment_min(
        jnp.where(valid, score, jnp.inf).reshape(-1), flat_group, num_segments=num_groups
    )
    return count, mean, squares, high == low


def grpo(score: jax.Array, group: jax.Array, valid: jax.Array, *, num_groups: int) -> jax.Array:
    """(s - mean) / (sd + 1e-6) within the group, sd with ddof 1.

    `score` float32, `group` int32 in [0, num_groups), `valid` bool: any equal shape. A group of one
    has mean 0 and sd 1. A group whose scores are all equal gets exactly 0: rounding of the mean
    must not make an advantage up. Shao et al. 2024 (arxiv.org/abs/2402.03300), sec. 4.1.2.
    """
    count, mean, squares, equal = group_statistics(score, group, valid, num_groups)
    sd = jnp.sqrt(squares / jnp.maximum(count - 1.0, 1.0))
    single = count == 1
    mean = jnp.where(single, 0.0, mean)
    sd = jnp.where(single, 1.0, sd)
    advantage = (score - mean[group]) / (sd[group] + 1e-6)
    flat = (equal & ~single)[group]
    return jnp.where(valid & ~flat, advantage, 0.0)


def dr_grpo(score: jax.Array, group: jax.Array, valid: jax.Array, *, num_groups: int) -> jax.Array:
    """s - mean within the group. Liu et al. 2025 (arxiv.org/abs/2503.20783), sec. 3.2.

    Arguments as in `grpo`; a group of one keeps s, equal scores give exactly 0.
    """
    count, mean, _, equal = group_statistics(score, group, valid, num_groups)
    single = count == 1
    mean = jnp.where(single, 0.0, mean)
    flat = (equal & ~single)[group]
    return jnp.where(valid & ~flat, score - mean[group], 0.0)


def rloo(score: jax.Array, group: jax.Array, valid: jax.Array, *, num_groups: int) -> jax.Array:
    """(s - mean) n / (n - 1): the mean of the others as baseline. Ahmadian et al. 2024
    (arxiv.org/abs/2402.14740), sec. 2.2. A group of one keeps s; arguments as in `grpo`.
    """
    count, mean, _, equal = group_statistics(score, group, valid, num_groups)
    single = count == 1
    mean = jnp.where(single, 0.0, mean)
    factor = jnp.where(single, 1.0, count / jnp.maximum(count - 1.0, 1.0))
    flat = (equal & ~single)[group]
    return jnp.where(valid & ~flat, (score - mean[group]) * factor[group], 0.0)


ADVANTAGES: dict[str, Callable[..., jax.Array]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}
