"""Metrics of host stages that ran in parts: what follows from all of them, once."""

import pytest

from distflow_jax.coordinator.coordinator import merge_parts
from distflow_jax.layout import Parts


def mean(values):
    return {"reward/mean": sum(values) / len(values)}


def test_parts_of_several_calls_are_one_metric():
    first, second = Parts((1.0, 2.0), mean), Parts((6.0,), mean)
    assert merge_parts({"reward": first + second, "loss": 5}) == {"loss": 5, "reward/mean": 3.0}


def test_metrics_without_parts_are_left_as_they_are():
    metrics = {"loss": object()}
    assert merge_parts(metrics) is metrics


def test_a_name_that_two_nodes_report_is_named():
    parts = {"reward": Parts((1.0,), mean), "judge": Parts((2.0,), mean)}
    with pytest.raises(ValueError, match=r"node 'judge': .* \['reward/mean'\]; rename them"):
        merge_parts(parts)
    with pytest.raises(ValueError, match="node 'reward'"):
        merge_parts({"reward": Parts((1.0,), mean), "reward/mean": 1.0})


def test_where_workers_choose_names_those_in_parts_count():
    metrics = {"reward": Parts((1.0,), mean), "reward/mean": 7.0, "loss": 5}
    assert merge_parts(metrics, strict=False) == {"reward/mean": 1.0, "loss": 5}
