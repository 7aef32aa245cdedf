"""Scores are combined by weights, and groups become pairs."""

import types

import numpy as np
import pytest

from distflow_jax.coordinator.coordinator import merge_parts
from distflow_jax.dag.graph import Node
from distflow_jax.stages.score_choices import build_choose_pairs, build_weighted_sum


def weighted(reads, weights):
    node = Node(
        "mix", "REWARD", "COMPUTE", reads=reads, writes=["score"], options={"weights": weights}
    )
    return build_weighted_sum(types.SimpleNamespace(node=node, prefix=""))


def test_scores_add_up_by_their_weights_and_each_is_logged():
    stage = weighted({"rule": "score", "model": "rm_score"}, {"rule": 1, "model": 0.5})
    fields = {"rule": np.array([0, 1], np.float32), "model": [np.float32(4), np.float32(-2)]}
    _, written, metrics = stage(None, fields, {})
    np.testing.assert_allclose(written["score"], [2, 0])
    assert written["score"].dtype == np.float32
    assert merge_parts(metrics) == {"reward/rule": 0.5, "reward/model": 1.0}
    _, written, metrics = stage(None, fields | {"rule": np.array([np.nan, 1], np.float32)}, {})
    np.testing.assert_array_equal(written["score"], [np.nan, 0])
    assert merge_parts(metrics) == {"reward/rule": 1.0, "reward/model": 1.0}


@pytest.mark.parametrize(
    "weights, message",
    [
        (None, "node 'mix': options.weights must have one number for each of .'model', 'rule'."),
        ({"rule": 1}, "got .'rule'."),
        ({"rule": 1, "model": "2"}, "options.weights.model must be a number, got '2'"),
    ],
)
def test_every_score_needs_a_weight(weights, message):
    with pytest.raises(ValueError, match=message):
        weighted(["rule", "model"], weights)


def pairs(num_samples):
    node = Node("choose", "REWARD", "COMPUTE", fn="choose_pairs", writes=["keep"])
    return build_choose_pairs(types.SimpleNamespace(node=node, num_samples=num_samples))


def test_the_best_and_the_worst_of_a_group_are_its_pair():
    uid = np.array([(7, 0), (7, 1), (7, 2), (2, 0), (2, 1), (9, 0)])
    score = [0.0, 3.0, -1.0, 5.0, 5.0, 1.0]
    _, written, _ = pairs(num_samples=3)(None, {"uid": uid, "score": score}, {})
    assert written["keep"].tolist() == [0, 1, 2, 0, 0, 0]
    score = [np.nan, 3.0, -1.0, np.nan, np.nan, 1.0]  # not scored
    _, written, _ = pairs(num_samples=3)(None, {"uid": uid, "score": score}, {})
    assert written["keep"].tolist() == [0, 1, 2, 0, 0, 0]


def test_a_group_of_one_has_no_pair():
    with pytest.raises(ValueError, match="node 'choose': .* rollout.num_samples=1; use at least 2"):
        pairs(num_samples=1)
