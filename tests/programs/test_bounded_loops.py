"""The bound of a loop, from wherever it is read."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.programs.bounded_loops import bound_of, bounded_loop, is_seldom
from distflow_jax.programs.jaxpr_flops import matmul_flops


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("at_most_5", 5),
        ("jit(f)/at_most_12/while", 12),
        ("jit(f)/at_most_5/while/body/transpose(jvp(at_most_7))/while", 7),
        ("jit(f)/at_most_5/while/body/while", None),
        ("jit(f)/while/body/at_most_8_but_once_in_4/while", 6),
        ("at_most_7_but_once_in_1", 0),
        ("at_most_5/scan", None),
        ("", None),
    ],
)
def test_the_innermost_name_is_the_loops_own(name, most):
    assert bound_of(name) == most


@pytest.mark.parametrize(
    ("name", "seldom"),
    [
        ("jit(f)/at_most_12/while/body/seldom/cond", True),
        ("vmap(seldom)", True),
        ("jit(f)/seldom/cond/branch_1_fun/cond", False),
        ("seldomly/cond", False),
        ("", False),
    ],
)
def test_a_conditional_is_marked_by_its_own_scope(name, seldom):
    assert is_seldom(name) == seldom


def test_it_is_a_fori_loop():
    run = jax.jit(lambda n: bounded_loop(n, lambda i, x: x + i, jnp.int32(0), most=9))
    assert [int(run(np.int32(n))) for n in (0, 1, 5)] == [0, 0, 10]


def test_a_loop_that_is_idle_once_counts_for_the_other_runs():
    """Three of four runs of an enclosing scan make up to 5 products each."""

    def run(x):
        def one(x, index):
            trips = jnp.where(index == 0, 0, 5)
            return bounded_loop(trips, lambda _, y: y @ x, x, most=5, idle_once_in=4), None

        return jax.lax.scan(one, x, jnp.arange(4))[0]

    found = matmul_flops(jax.make_jaxpr(run)(jnp.ones((8, 8))))
    assert found.unbounded == () and found.total == 3 * 5 * 2 * 8**3


@jax.custom_vjp
def power(x, trips):
    return bounded_loop(trips, lambda _, y: y @ x, x, most=7)


def power_forward(x, trips):
    return power(x, trips), (x, trips)


def power_backward(saved, g):
    x, trips = saved
    return bounded_loop(trips, lambda _, y: y @ x, g, most=11), None


power.defvjp(power_forward, power_backward)


def nested(x, weights, outer, inner):
    """A bounded loop over the gradient of a scan over checkpointed layers with a loop inside."""

    def loss(x):
        def layer(x, w):
            return power(x @ w, inner), None

        body = jax.checkpoint(layer, prevent_cse=False)
        return jax.lax.scan(body, x, weights)[0].sum()

    return bounded_loop(outer, lambda _, x: x + jax.jit(jax.grad(loss))(x), x, most=5)


@pytest.fixture(scope="module")
def traced():
    x, n = jnp.ones((8, 8)), jnp.int32(1)
    return jax.jit(nested).trace(x, jnp.ones((3, 8, 8)), n, n)


def test_bounds_are_found_through_gradients_and_checkpoints(traced):
    product = 2 * 8**3
    # per layer: x @ w and 7 trips forward; x @ w again, 11 trips and the product of d x backward
    found = matmul_flops(traced.jaxpr)
    assert found.unbounded == ()
    assert found.total == 5 * 3 * (1 + 7 + 1 + 11 + 1) * product


def test_bounds_stand_in_the_hlo(traced):
    text = traced.lower().compile().as_text()
    loops = [line for line in text.splitlines() if " while(" in line]
    names = [re.search(r'op_name="([^"]*)"', line)[1] for line in loops]
    scans = [name for name in names if bound_of(name) is None]
    assert sorted(filter(None, map(bound_of, names))) == [5, 7, 11]
    # forward and backward over the layers; these say their trip count themselves
    assert len(scans) == 2 and len(names) == 5
    assert all("known_trip_count" in line for line in loops if "at_most" not in line)
