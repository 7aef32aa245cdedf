"""Sums and extremes over the positions a mask selects, safe against inf and nan elsewhere.

Arguments have any equal shape; means and variances are over all of it, so that a batch divided over
devices gives the same number as the batch on one.
"""

import jax
import jax.numpy as jnp


def masked_sum(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum of x where mask (same shape); what lies elsewhere does not matter, even inf or nan."""
    return jnp.sum(jnp.where(mask, x, 0.0))


def masked_max(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Largest x where mask; -inf if there is none."""
    return jnp.max(jnp.where(mask, x, -jnp.inf))


def masked_min(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Smallest x where mask; inf if there is none."""
    return jnp.min(jnp.where(mask, x, jnp.inf))


def safe_divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """numerator / denominator, 0 where the denominator is 0."""
    empty = denominator == 0
    return jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, denominator))


def masked_count(mask: jax.Array) -> jax.Array:
    """Number of positions that mask selects, float32."""
    # counted as integers: a float32 sum of ones stops at 2^24
    return mask.sum(dtype=jnp.int32).astype(jnp.float32)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of x where mask; 0 if there is none."""
    return safe_divide(masked_sum(x, mask), masked_count(mask))


def masked_variance(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Unbiased variance of x where mask (N - 1 below); 0 of fewer than two."""
    squares = masked_sum(jnp.square(x - masked_mean(x, mask)), mask)
    return safe_divide(squares, jnp.maximum(masked_count(mask) - 1.0, 0.0))


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """(x - mean) / sqrt(variance + 1e-8) over all positions of mask; 0 elsewhere."""
    scale = jax.lax.rsqrt(masked_variance(x, mask) + 1e-8)
    return jnp.where(mask, (x - masked_mean(x, mask)) * scale, 0.0)
