"""Each compiled program is counted once, while somebody counts."""

import jax
import jax.numpy as jnp
import pytest

from distflow_jax.observe.compilations import Compilations


@pytest.fixture
def counter():
    counter = Compilations()
    yield counter
    counter.close()


def test_counts_each_program_once(counter):
    @jax.jit
    def double_it(x):
        return x * 2

    inputs = [jnp.zeros(3), jnp.ones(3), jnp.zeros(4)]
    counter.take()
    double_it(inputs[0])
    assert "double_it" in counter.names()[0]
    assert counter.take() == 1
    double_it(inputs[1])
    assert counter.take() == 0
    double_it(inputs[2])  # another shape
    assert counter.take() == 1
    assert counter.seconds > 0


def test_stops_counting_when_closed():
    counter = Compilations()
    counter.close()
    jax.jit(lambda x: x + 17)(1.0)
    assert counter.count == 0
