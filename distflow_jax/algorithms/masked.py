"""Sums and extremes over the positions a mask selects, safe against inf and nan elsewhere."""

import jax
import jax.numpy as jnp


def masked_sum(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum of x where mask (same shape); what lies elsewhere does not matter, even inf or nan."""
    return jnp.sum(jnp.where(mask, x, 0.0))


def masked_max(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Largest x where mask; -inf if there is none."""
    return jnp.max(jnp.where(mask, x, -jnp.inf))


def safe_divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """numerator / denominator, 0 where the denominator is 0."""
    empty = denominator == 0
    return jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, denominator))
