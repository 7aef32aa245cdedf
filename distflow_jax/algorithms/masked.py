"""Masked sums, extremes, means and variances, unaffected by inf and nan outside the mask.

Arguments have any equal shape. Reductions run over all of it, so a batch divided over devices gives
the same number as the same batch on one device.
"""

import jax
import jax.numpy as jnp


def masked_sum(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum of x over the mask, a scalar."""
    return jnp.sum(jnp.where(mask, x, 0.0))


def masked_max(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Largest x under the mask, a scalar; -inf for an empty mask."""
    return jnp.max(jnp.where(mask, x, -jnp.inf))


def masked_min(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Smallest x under the mask, a scalar; inf for an empty mask."""
    return jnp.min(jnp.where(mask, x, jnp.inf))


def safe_divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """numerator / denominator, any shape; 0 where the denominator is 0."""
    empty = denominator == 0
    return jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, denominator))


def masked_count(mask: jax.Array) -> jax.Array:
    """Number of True entries of a mask of any shape, float32."""
    # counted as integers: a float32 sum of ones stops at 2^24
    return mask.sum(dtype=jnp.int32).astype(jnp.float32)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of x over the mask, a scalar; 0 for an empty mask."""
    return safe_divide(masked_sum(x, mask), masked_count(mask))


def offset(low: jax.Array, high: jax.Array) -> jax.Array:
    """Number to subtract from numbers between `low` and `high` before they are added, any shape.

    `low` where a float32 sum would lose the differences, which are exact relative to it; else 0, so
    that nothing changes. Extremes do not depend on rows or devices, as sums may.
    """
    return jnp.where(jnp.abs(low) > 256.0 * (high - low), low, 0.0)


def without_offset(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x less its `offset` over the mask, any shape; without a meaning outside the mask."""
    return x - offset(masked_min(x, mask), masked_max(x, mask))


def masked_variance(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Unbiased variance (divisor N - 1) of x over the mask, a scalar; 0 for fewer than two."""
    x = without_offset(x, mask)
    squares = masked_sum(jnp.square(x - masked_mean(x, mask)), mask)
    return safe_divide(squares, jnp.maximum(masked_count(mask) - 1.0, 0.0))


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """(x - mean) / sqrt(variance + 1e-8) over the mask, any shape; 0 outside it or for equal x."""
    x = without_offset(x, mask)
    scale = jax.lax.rsqrt(masked_variance(x, mask) + 1e-8)
    return jnp.where(mask, (x - masked_mean(x, mask)) * scale, 0.0)
