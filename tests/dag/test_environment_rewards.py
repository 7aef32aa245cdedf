"""Rewards of environments reach the scores in every graph."""

import logging

import pytest

from distflow_jax.config.config_dict import from_config_dict, override, to_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.dag.added_fields import FIELD, with_environment_rewards
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.graph_yaml import load_graph
from distflow_jax.planning.plan_run import settle
from distflow_jax.planning.settings_in_use import warn_of_unread_rewards


def config_of(*assignments):
    return from_config_dict(Config, override(to_config_dict(Config()), assignments))


def fields(graph):
    """{node: (environment_reward that it reads, that it writes)}, of those that have any"""
    found = {n.id: (n.reads.get(FIELD), n.writes.get(FIELD)) for n in graph.nodes}
    return {id: pair for id, pair in found.items() if any(pair)}


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo", "online_dpo"])
def test_scores_read_what_rollouts_write(name):
    graph = with_environment_rewards(load_graph(name, Config()))
    assert fields(graph) == {"rollout": (None, FIELD), "reward": (FIELD, None)}
    assert with_environment_rewards(graph) == graph


def test_each_sampler_has_its_own():
    graph = with_environment_rewards(load_graph("remax", Config()))
    own, greedy = f"rollout_{FIELD}", f"greedy_rollout_{FIELD}"
    assert fields(graph) == {
        "rollout": (None, own),
        "reward": (own, None),
        "greedy_rollout": (None, greedy),
        "greedy_reward": (greedy, None),
    }


def test_a_graph_that_names_the_field_itself_stays():
    nodes = [
        Node("r", "ROLLOUT", "MODEL_INFERENCE", reads=["prompt"],
             writes={"response": "response", FIELD: "won"}),
        Node("s", "REWARD", "COMPUTE", deps=["r"], reads=["prompt", "response"], writes=["score"]),
        Node("t", "REWARD", "COMPUTE", deps=["r"], reads=["response"], writes=["x"], fn="a:b"),
    ]  # fmt: skip
    graph = with_environment_rewards(Graph("own", nodes))
    assert fields(graph) == {"r": (None, "won"), "s": ("won", None)}


def test_only_with_an_environment():
    assert fields(settle(config_of())[1]) == {}
    graph = settle(config_of("rollout.environment=calculator"))[1]
    assert fields(graph) == {"rollout": (None, FIELD), "reward": (FIELD, None)}


def test_without_a_rollout_there_is_nothing_to_do():
    assert fields(settle(config_of("dag=sft", "rollout.environment=calculator"))[1]) == {}


@pytest.mark.parametrize(
    ("kind", "environment", "told"),
    [
        ("MODEL_INFERENCE", "own.py:Game", True),
        ("MODEL_INFERENCE", "tools", False),
        ("COMPUTE", "own.py:Game", False),
    ],
)
def test_rewards_that_no_node_reads_are_named(caplog, kind, environment, told):
    reads = ["rows"] if kind == "MODEL_INFERENCE" else ["prompt", "response"]
    nodes = [
        Node("r", "ROLLOUT", "MODEL_INFERENCE", reads=["prompt"], writes=["response"]),
        Node("judge", "REWARD", kind, deps=["r"], reads=reads, writes=["score"]),
    ]
    graph = with_environment_rewards(Graph("judged", nodes))
    with caplog.at_level(logging.WARNING, "distflow_jax"):
        warn_of_unread_rewards(environment, graph)
    assert len(caplog.records) == told
    assert all("node 'r': no node reads the rewards" in r.message for r in caplog.records)
