"""The critic's loss and the variance that it explains."""

import jax
import jax.numpy as jnp
import numpy as np
from support import formulas
from support.ragged import assert_close

from distflow_jax.algorithms.value import explained_variance, value_loss


def one(v, old, g, clip):
    return 0.5 * max((v - g) ** 2, (min(max(v, old - clip), old + clip) - g) ** 2)


@jax.jit
def loss_and_gradient(value, old, returns, mask):
    def total(value):
        out = value_loss(value, old, returns, mask, clip=0.5)
        return jnp.sum(out.loss), out

    gradient, out = jax.grad(total, has_aux=True)(value)
    return out, gradient


def test_matches_the_definition():
    rng = np.random.default_rng(0)
    old, returns, step = (rng.normal(size=(5, 9)).astype(np.float32) for _ in range(3))
    value, mask = old + step, rng.random((5, 9)) < 0.7
    poisoned = (np.where(mask, x, np.float32(np.nan)) for x in (value, old, returns))
    out, gradient = loss_and_gradient(*poisoned, mask)
    flat = [np.float64(x[mask]) for x in (value, old, returns)]
    expected = [one(v, o, g, 0.5) for v, o, g in zip(*flat, strict=True)]
    assert_close(np.asarray(out.loss)[mask], expected)

    def total(v):
        return sum(one(a, o, g, 0.5) for a, o, g in zip(v, *flat[1:], strict=True))

    assert_close(np.asarray(gradient)[mask], formulas.gradient(total, flat[0]))
    clipped = np.asarray(out.clipped)[mask]
    bounded = np.clip(flat[0], flat[1] - 0.5, flat[1] + 0.5)
    np.testing.assert_array_equal(clipped, (bounded - flat[2]) ** 2 > (flat[0] - flat[2]) ** 2)
    assert 0 < clipped.mean() < 1
    for x in (*out, gradient):
        np.testing.assert_array_equal(np.asarray(x)[~mask], 0)


def test_explained_variance():
    rng = np.random.default_rng(1)
    returns = rng.normal(3, 2, (4, 6)).astype(np.float32)
    value = returns + rng.normal(0, 0.5, (4, 6)).astype(np.float32)
    mask = rng.random((4, 6)) < 0.7
    left, total = (returns - value)[mask].var(ddof=1), returns[mask].var(ddof=1)
    poisoned = (jnp.asarray(np.where(mask, x, np.nan)) for x in (value, returns))
    assert_close(explained_variance(*poisoned, jnp.asarray(mask)), 1 - left / total)
    mask = jnp.asarray(mask)
    assert_close(explained_variance(jnp.asarray(returns), jnp.asarray(returns), mask), 1.0)
    constant = jnp.full((4, 6), 3.0)
    assert_close(explained_variance(constant, jnp.asarray(returns), mask), 0.0)
    assert_close(explained_variance(jnp.asarray(value), constant, mask), 0.0)


def test_explained_variance_of_returns_far_from_0():
    """1e6 + {0, 1, 2}; and equal ones, which do not vary by the rounding of their mean."""
    rng = np.random.default_rng(2)
    steps, mask = (
        rng.integers(0, 3, (4, 6)).astype(np.float32),
        jnp.asarray(rng.random((4, 6)) < 0.7),
    )
    value = steps + rng.normal(0, 0.5, (4, 6)).astype(np.float32)
    value = np.float32(1e6 + value.round(3))  # multiples of 1 / 16
    far = explained_variance(jnp.asarray(value), jnp.asarray(1e6 + steps), mask)
    near = explained_variance(jnp.asarray(value - np.float32(1e6)), jnp.asarray(steps), mask)
    np.testing.assert_allclose(far, near, rtol=1e-5)
    for x in (0.1, -0.7, 1e6, 3e7):
        assert explained_variance(jnp.asarray(value), jnp.full((4, 6), x, jnp.float32), mask) == 0
