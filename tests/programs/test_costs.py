"""All costs of one program."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.programs.costs import Costs, costs_of, in_turn
from distflow_jax.programs.traffic import CollectiveTraffic


def update(state, weight):
    return state + jnp.tanh(state @ weight)


@pytest.fixture(scope="module")
def traced():
    like = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return jax.jit(update, donate_argnums=0).trace(like, like)


def test_costs_of_a_program(traced):
    found = costs_of(traced, traced.lower().compile())
    size = 4 * 64 * 64
    assert found.flops == 2 * 64**3
    assert found.bytes_accessed >= 3 * size
    assert found.collective_bytes == {} and found.unbounded == () and found.unread == 0
    assert found.argument_bytes == 2 * size
    # the donated state gives its place to the new one
    assert found.output_bytes == found.alias_bytes == size
    assert found.peak_bytes == 2 * size + found.temp_bytes


def test_costs_that_need_no_compilation(traced):
    found = costs_of(traced, None)
    assert found == Costs(2.0 * 64**3)
    assert found.peak_bytes is None


class Silent:
    """A compiled program of a platform that tells nothing."""

    def as_text(self):
        return None

    def memory_analysis(self):
        return None


def test_a_platform_that_tells_nothing(traced):
    assert costs_of(traced, Silent()) == costs_of(traced, None)


def test_costs_are_plain_data(traced):
    for costs in (costs_of(traced, None), costs_of(traced, traced.lower().compile())):
        tree = costs.to_tree()
        assert json.loads(json.dumps(tree)) == tree
        assert tree["peak_bytes"] == costs.peak_bytes


def test_programs_one_after_the_other():
    """One of them three times: all adds up but temporaries."""
    pairs, other = np.array([[0, 1], [2, 3]]), np.array([[0, 2], [1, 3]])
    gather = CollectiveTraffic("all-gather", ("fsdp",), False, 100.0, 2, pairs)
    permute = CollectiveTraffic("collective-permute", ("tensor",), True, 30.0, 1, other)
    first = Costs(10.0, (), 50.0, {"all-gather": 100.0}, (gather,), temp_bytes=7)
    kinds = {"all-gather": 100.0, "collective-permute": 30.0}
    second = Costs(1.0, ("loop",), 5.0, kinds, (gather, permute), temp_bytes=9, unread=1)
    found = in_turn([(first, 1), (second, 3)], argument_bytes=40, output_bytes=60)
    assert found == Costs(
        13.0,
        ("loop",),
        65.0,
        {"all-gather": 400.0, "collective-permute": 90.0},
        (
            dataclasses.replace(gather, bytes=400.0, times=8),
            dataclasses.replace(permute, bytes=90.0, times=3),
        ),
        argument_bytes=40,
        output_bytes=60,
        temp_bytes=9,
        alias_bytes=0,
        unread=1,
    )
    assert found.peak_bytes == 109
