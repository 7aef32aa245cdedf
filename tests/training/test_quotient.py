"""Sums whose denominators come later: what is linear works on them as on the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.training.quotient import Divisor, Quotient, divisors_of, named

TOKENS, SEQUENCES = jnp.float32(40.0), jnp.float32(6.0)


def loss(x, y, denominators):
    """All that an objective may do with a denominator."""
    tokens, (sequences,) = denominators["tokens"], denominators["others"]
    per_layer = jnp.stack([x, y, x * y]) / sequences
    mean = np.float32(3.0) / tokens - 0.5 * (x / tokens)
    return 2.0 * mean + y * per_layer.sum() + per_layer.mean() + x - (1.0 - y / sequences)


def denominators():
    return {"tokens": TOKENS, "others": (SEQUENCES,)}


def test_a_quotient_stands_for_the_number():
    x, y = jnp.float32(1.7), jnp.float32(-2.3)
    kept = loss(x, y, divisors_of(denominators()))
    assert kept.parts.keys() == {"['tokens']", "['others'][0]", "1"}
    wanted = loss(x, y, denominators())
    np.testing.assert_allclose(kept.over(named(denominators())), wanted, rtol=1e-6)


def test_numerators_add_up_before_they_are_divided():
    """As pytrees: of two parts of a step, added by name."""

    @jax.jit
    def numerators(x, y):
        return loss(x, y, divisors_of(denominators()))

    parts = [numerators(*pair) for pair in ((0.5, 2.0), (1.5, -1.0))]
    total = jax.tree.map(jnp.add, *parts)
    wanted = sum(
        loss(jnp.float32(x), jnp.float32(y), denominators()) for x, y in ((0.5, 2), (1.5, -1))
    )
    np.testing.assert_allclose(total.over(named(denominators())), wanted, rtol=1e-6)


def test_a_setting_of_zero_leaves_its_term_out():
    x = jnp.float32(2.0)
    whole = x / Divisor("a") + 0.0 * (x / Divisor("b"))
    assert whole.parts.keys() == {"a"}
    assert (0 * whole).over({}) == 0
    assert (jnp.float32(0.0) * whole).parts.keys() == {"a"}  # a traced number may be anything


def test_names_are_those_of_any_tree():
    one = divisors_of(jnp.float32(3.0))
    assert (jnp.float32(6.0) / one + 1.0).over(named(jnp.float32(3.0))) == 3


def test_what_is_not_linear_is_refused():
    part = jnp.float32(1.0) / Divisor("a")
    for wrong in (lambda: part * part, lambda: part / Divisor("b"), lambda: jnp.exp(part)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(TypeError):
        part + Divisor("a")
    assert Quotient.of(part) is part
