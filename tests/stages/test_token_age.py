"""Ages follow from versions and the step, a3po's weights from ages; graphs get them themselves."""

import types

import numpy as np
import pytest

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.algorithm_tables import PROXIMAL
from distflow_jax.config.run_config import Config
from distflow_jax.dag.added_fields import AGE, ALPHA, NODE, with_ages
from distflow_jax.dag.graph import Node
from distflow_jax.dag.graph_yaml import load_graph
from distflow_jax.stages.reward import build_token_age

VERSIONS = [np.array([3, 3, 4, 6], np.int32), np.array([6], np.int32), np.zeros(2, np.int32)]


def context_of(node, proximal="a3po"):
    algorithm = AlgorithmConfig(proximal=proximal)
    return types.SimpleNamespace(node=node, algorithm=algorithm)


@pytest.mark.parametrize("proximal", PROXIMAL)
def test_a_token_is_as_old_as_the_steps_since(proximal):
    """The weights are AReaL's, of an age that is less by one, or ours: d / (d + 1)."""
    node = Node(NODE, "REWARD", "COMPUTE", [], ["version", "step"], ["age", ALPHA], fn=NODE)
    stage = build_token_age(context_of(node, proximal))
    fields = {"version": VERSIONS, "step": np.full(3, 7, np.int64)}
    _, written, metrics = stage(None, fields, {})
    assert metrics == {}
    for age, alpha, version in zip(written["age"], written[ALPHA], VERSIONS, strict=True):
        assert age.dtype == alpha.dtype == np.float32
        np.testing.assert_array_equal(age, 6 - version)
        d = np.maximum(6.0 - version - (proximal == "a3po_areal"), 0)
        np.testing.assert_array_equal(alpha, np.float32(d / (d + 1)))
        assert not alpha[version == 6].any()


@pytest.mark.parametrize("fields", [[ALPHA], [AGE], [ALPHA, AGE]], ids=str)
@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo", "remax"])
def test_every_update_of_a_built_in_graph_reads_them(name, fields):
    graph = with_ages(load_graph(name, Config()), fields)
    by_id = {node.id: node for node in graph.nodes}
    assert by_id[NODE].reads.keys() == {"version", "step"}
    trained = [n for n in graph.nodes if (n.role, n.type) == ("ACTOR", "MODEL_TRAIN")]
    assert by_id[NODE].writes.keys() == set(fields)
    assert trained and all(NODE in node.deps for node in trained)
    assert all(set(fields) <= node.reads.keys() for node in trained)
    assert with_ages(graph, fields) is graph


@pytest.mark.parametrize("name", ["sft", "dpo", "online_dpo"])
def test_graphs_without_a_ratio_stay_as_they_are(name):
    graph = load_graph(name, Config())
    assert with_ages(graph, [ALPHA, AGE]) is graph
