"""KL estimators: values, gradients and expectations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.algorithms.kl import KL_ESTIMATORS
from distflow_jax.config.algorithm_config import AlgorithmConfig

REFERENCES = {
    "k1": (lambda d: d, lambda d: np.ones_like(d)),
    "abs": (np.abs, np.sign),
    "k2": (lambda d: d**2 / 2, lambda d: d),
    "k3": (lambda d: np.exp(-d) + d - 1, lambda d: 1 - np.exp(-d)),
    "k1+": (lambda d: d, lambda d: d),
    "k3+": (lambda d: np.exp(-d) + d - 1, lambda d: d),
}
D = np.array([-2.2, -1.0, -0.3, -1e-2, -1e-4, 0.0, 1e-4, 1e-2, 0.3, 1.0, 4.0, 10.5])


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(name, logp, ref):
    """Both token by token."""
    kl, backward = jax.vjp(lambda x: KL_ESTIMATORS[name](x, ref), logp)
    return kl, backward(jnp.ones_like(kl))[0]


def test_every_estimator_is_tested():
    assert set(KL_ESTIMATORS) == set(REFERENCES)


@pytest.mark.parametrize("name", REFERENCES)
def test_values_and_gradients(name):
    # reference 0, so that logp - ref is exact in float32
    logp, ref = jnp.asarray(D, jnp.float32), jnp.zeros(D.shape, jnp.float32)
    exact = np.asarray(logp, np.float64)
    value, gradient = REFERENCES[name]
    if name in ("k3", "k3+"):
        exact = np.where(value(exact) > 10, np.nan, exact)  # clipped: a test of its own
    got, slope = (np.asarray(x) for x in value_and_gradient(name, logp, ref))
    fine = np.isfinite(exact)
    # the value of k3 near 0 is D^2 / 2 = 5e-9, beside terms of 1e-4: expm1 keeps what is left
    np.testing.assert_allclose(got[fine], value(exact[fine]), rtol=2e-3, atol=1e-11)
    np.testing.assert_allclose(slope[fine], gradient(exact[fine]), rtol=1e-5, atol=1e-7)


def test_equal_policies_have_no_kl():
    logp = jnp.asarray(np.random.default_rng(0).normal(size=50), jnp.float32)
    for name in KL_ESTIMATORS:
        got, slope = value_and_gradient(name, logp, logp)
        np.testing.assert_array_equal(got, 0)
        np.testing.assert_array_equal(slope, 1 if name == "k1" else 0)


@pytest.mark.parametrize("name", ["k3", "k3+"])
def test_k3_is_bounded(name):
    d = jnp.array([-1e4, -25.0, -3.0, 25.0, 1e4])
    got, slope = value_and_gradient(name, d, jnp.zeros(5))
    assert (got >= 0).all() and (got <= 10).all() and np.isfinite(slope).all()


def test_expectations():
    """Under the policy, k1 and k3 average to the KL, and the gradient of k2 is that of the KL."""
    rng = np.random.default_rng(2)
    # near each other, so that the clip of k3's value at 10 plays no part
    logits, ref = (jnp.asarray(rng.normal(size=12) / 2, jnp.float32) for _ in range(2))

    def kl(x):
        p = jax.nn.softmax(x)
        return jnp.sum(p * (jax.nn.log_softmax(x) - jax.nn.log_softmax(ref)))

    p = jax.lax.stop_gradient(jax.nn.softmax(logits))

    def expected(name, x):
        per_token = KL_ESTIMATORS[name](jax.nn.log_softmax(x), jax.nn.log_softmax(ref))
        return jnp.sum(p * per_token)

    true, slope = jax.jit(jax.value_and_grad(kl))(logits)
    names = tuple(KL_ESTIMATORS)
    got = jax.jit(lambda x: [jax.value_and_grad(functools.partial(expected, n))(x) for n in names])
    got = dict(zip(names, got(logits), strict=True))
    for name in ("k1", "k3", "k1+", "k3+"):
        np.testing.assert_allclose(got[name][0], true, rtol=1e-4)
    for name in ("k2", "k1+", "k3+"):
        np.testing.assert_allclose(got[name][1], slope, rtol=1e-4, atol=1e-6)
    # and k1 as a loss teaches nothing, which is why it is refused there
    np.testing.assert_allclose(got["k1"][1], 0, atol=1e-6)
    with pytest.raises(ValueError, match="k1.*zero expected gradient"):
        AlgorithmConfig(kl_coef=0.1, kl_estimator="k1")
    AlgorithmConfig(kl_coef=0.1, kl_estimator="k1", kl_in_reward=True)
