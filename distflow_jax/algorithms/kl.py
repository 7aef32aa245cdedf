"""Per-token estimators of KL(policy || reference), with D = logp - ref.

Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). Arguments and results
are float32 of any equal shape.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def k1(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """D, any shape. Unbiased; the expectation of its gradient as a loss is zero."""
    return logp - ref_logp


def absolute(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """|D|, any shape, with gradient 0 where D is 0."""
    d = logp - ref_logp
    # the gradient of jnp.abs at 0 is 1, which would push equal policies to one side
    return d * jax.lax.stop_gradient(jnp.sign(d))


def k2(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """D^2 / 2, any shape."""
    return 0.5 * jnp.square(logp - ref_logp)


def k3(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """exp(-D) + D - 1, any shape, never negative; D is clipped to +-20, the result to +-10."""
    d = jnp.clip(logp - ref_logp, -20.0, 20.0)
    # expm1: exp(-D) - 1 + D cancels all digits for small D
    return jnp.clip(jnp.expm1(-d) + d, -10.0, 10.0)


def k1_plus(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """Value of k1 with the gradient of k2 (straight-through), any shape.

    The expectations of value and gradient are those of the true KL. Named as in verl, whose "+"
    joins the gradient of k2 to any estimator.
    """
    straight = k2(logp, ref_logp)
    return straight + jax.lax.stop_gradient(k1(logp, ref_logp) - straight)


def k3_plus(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """Value of k3 with the gradient of k2 (straight-through), any shape.

    The expectation of the gradient is that of the true KL.
    """
    straight = k2(logp, ref_logp)
    return straight + jax.lax.stop_gradient(k3(logp, ref_logp) - straight)


# estimators whose gradient is that of the KL, in expectation or to second order
LOSS_ESTIMATORS = ("k2", "k3", "k1+", "k3+")

KL_ESTIMATORS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": k1_plus,
    "k3+": k3_plus,
}
