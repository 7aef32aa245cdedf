"""Merged metrics do not depend on how the data were divided."""

import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.observe.metrics import merge, summarize, without_empty


def test_merge_does_not_depend_on_how_the_data_were_divided():
    values = np.random.default_rng(0).normal(size=60).astype(np.float32)
    whole = merge([{"actor/entropy": (values.sum(dtype=np.float64), 60)}])
    for sizes in ([1, 59], [10, 20, 30]):
        parts = np.split(values, np.cumsum(sizes)[:-1])
        merged = merge({"actor/entropy": (p.sum(dtype=np.float64), len(p))} for p in parts)
        assert merged["actor/entropy"] == pytest.approx(whole["actor/entropy"], abs=1e-12)


def test_merge_takes_device_scalars_and_leaves_out_means_over_nothing():
    parts = [{"a/b": (jnp.float32(3), jnp.int32(2)), "a/none": (0.0, 0)}, {"a/b": (1, 2)}]
    assert merge(parts) == {"a/b": 1.0}


def test_summarize():
    assert summarize("critic/score", [[1, 2], [3, 6]]) == {
        "critic/score/mean": 3.0,
        "critic/score/max": 6.0,
        "critic/score/min": 1.0,
    }
    assert summarize("critic/score", []) == {}


def test_extremes_over_nothing_are_left_out():
    inf = float("inf")
    values = {"a/max": -inf, "a_max": -inf, "a/min": inf, "b/max": inf, "b/min": -inf, "c": inf}
    assert without_empty(values) == {"b/max": inf, "b/min": -inf, "c": inf}
