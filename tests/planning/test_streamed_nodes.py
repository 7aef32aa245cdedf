"""Which nodes of a plan stream, and why the others wait."""

import dataclasses
import itertools

import pytest
from support.layouts import LAYOUTS

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.run_config import Config
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.graph_yaml import load_graph
from distflow_jax.dag.planner import plan
from distflow_jax.planning.partial_batches.streamed_nodes import (
    STREAMS,
    described,
    nodes_that_need_the_batch,
    streamed_nodes,
    streamed_units,
)

WAITS = "waits: "


def built(name):
    return plan(load_graph(name, Config()), LAYOUTS, ("uid", "prompt", "step"))


def found(name, how=None, **updates):
    made = built(name)
    algorithm = AlgorithmConfig(**(how or {}))
    needs_batch = nodes_that_need_the_batch(made, algorithm, **updates)
    return streamed_nodes(made, needs_batch, mini_batches=updates.get("mini_batches", 1))


@pytest.mark.parametrize("name", ["grpo", "rloo", "remax", "dapo", "gspo", "online_dpo"])
def test_every_node_of_these_graphs_streams(name):
    how = {"remax": {"advantage": "remax"}}.get(name)
    assert set(found(name, how).values()) == {STREAMS}


def test_from_the_first_node_that_needs_the_batch_on_the_step_waits():
    streamed = found("ppo", {"advantage": "gae"})
    assert {name for name, text in streamed.items() if text == STREAMS} == {
        *("rollout", "reward", "old_logp", "reference", "values")
    }
    assert streamed["advantage"].startswith("waits: algorithm.advantage='gae' is divided by")
    assert streamed["actor_train"] == "waits: reads advantage of advantage, which waits"
    column, lines = described(streamed)
    assert column["advantage"] == "waits"
    assert column["values"] == STREAMS
    assert lines.startswith("advantage waits for the whole batch: algorithm.advantage='gae'")
    assert max(map(len, lines.splitlines())) <= 80


@pytest.mark.parametrize(
    "how, word",
    [
        ({"advantage": "reinforce_plus_plus"}, "standard deviation"),
        ({"advantage": "reinforce_plus_plus_baseline"}, "standard deviation"),
        ({"advantage": "gpg"}, "share of responses"),
        ({"advantage": "cpgd", "cpgd_weight": "clip_filter"}, "share of groups"),
        ({"kl_coef": 0.1, "kl_in_reward": True, "kl_target": 0.2, "kl_estimator": "k1"}, "mean KL"),
    ],
)
def test_advantages_of_the_whole_step(how, word):
    streamed = found("grpo", how)
    assert word in streamed["advantage"]
    assert streamed["actor_train"].startswith(WAITS)
    assert streamed["reference"] == STREAMS


def test_several_optimizer_steps():
    assert found("grpo", epochs=2)["actor_train"] == (
        "waits: training.epochs=2 trains all of the batch before any of it again"
    )
    assert "weights before the step's first" in found("grpo", mini_batches=2)["actor_train"]
    rollout = found("grpo", {"proximal": "rollout"}, mini_batches=2)
    assert rollout["actor_train"] == (
        "waits: training.mini_batches=2 would change the weights that old_logp uses"
    )
    assert found("grpo", mini_batches=2)["old_logp"] == STREAMS


def graph(*, scope="sample", fn=None, model="actor", late=False):
    nodes = [
        Node(
            *("gen", "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"]),
            ["response", "response_mask"],
        ),
        Node(
            "own", "ACTOR", "COMPUTE", ["gen"], ["rows"], {"x": "advantage"}, fn="a:b", scope=scope
        ),
        Node("train", "ACTOR", "MODEL_TRAIN", ["own"], ["rows", "advantage"], [], fn=fn),
        Node("probe", "ACTOR", "MODEL_INFERENCE", ["train"], ["rows"], ["old_logp"]),
        Node("after", "REFERENCE", "MODEL_INFERENCE", ["train"], ["rows"], ["ref_logp"]),
    ]
    return plan(Graph("g", nodes), LAYOUTS, ("uid", "prompt"))


def test_a_node_of_the_users_streams_by_its_scope():
    assert streamed_nodes(graph(scope="group"), {})["own"] == STREAMS
    streamed = streamed_nodes(graph(scope="batch"), {})
    assert streamed["own"] == "waits: scope batch"
    assert streamed["train"] == "waits: reads advantage of own, which waits"


def test_what_trains_or_uses_trained_weights_in_another_way_waits():
    streamed = streamed_nodes(graph(fn="a:b"), {})
    assert streamed["train"] == "waits: a:b updates a model by itself"
    streamed = streamed_nodes(graph(), {})
    assert streamed["train"] == STREAMS
    assert streamed["probe"] == "waits: uses the weights that train trains in the same step"


def after_a_batch_node(writes, *, probes=False):
    """GRPO's nodes after one on the host that writes a field from the whole batch."""
    sampled = ["response", "response_mask", "score"]
    nodes = [
        Node("gen", "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"], sampled),
        Node(
            *("chooser", "REWARD", "COMPUTE", ["gen"], ["score"], {"x": writes}),
            scope="batch",
            fn="a:b",
        ),
        Node("advantage", "ACTOR", "COMPUTE", ["gen"], ["rows", "score"], ["advantage"]),
        Node(
            *("actor_train", "ACTOR", "MODEL_TRAIN", ["advantage"], ["rows", "advantage"], []),
        ),
    ]
    if probes:
        reads, written = ["rows", writes], {"x": "probed"}
        nodes.append(
            Node("probe", "ACTOR", "MODEL_INFERENCE", ["chooser"], reads, written, fn="a:c")
        )
        nodes[3] = dataclasses.replace(nodes[3], deps=["advantage", "probe"])
    else:
        nodes[2] = dataclasses.replace(nodes[2], deps=["gen", "chooser"])
    return plan(Graph("g", nodes), LAYOUTS, ("uid", "prompt"))


@pytest.mark.parametrize("field", ["keep", "response_mask"])
def test_what_follows_a_node_that_changes_the_rows_waits_with_it(field):
    """No field of such a node is read: rows are packed of what it leaves."""
    streamed = streamed_nodes(after_a_batch_node(field), {})
    assert streamed["chooser"] == "waits: scope batch"
    assert streamed["advantage"] == "waits: comes after chooser, which waits"
    assert streamed["actor_train"] == "waits: reads advantage of advantage, which waits"


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_an_update_waits_for_what_uses_the_weights_before_it(mini_batches):
    made = after_a_batch_node("mark", probes=True)
    streamed = streamed_nodes(made, {}, mini_batches=mini_batches)
    assert streamed["probe"] == "waits: reads mark of chooser, which waits"
    assert streamed["advantage"] == STREAMS
    assert streamed["actor_train"] == "waits: comes after probe, which waits"


def test_a_program_streams_as_a_whole():
    made = graph()
    streamed = streamed_nodes(made, {})
    units = streamed_units(made, streamed)
    for unit in made.units:
        kinds = {streamed[task.node.id] == STREAMS for task in unit.tasks}
        assert len(kinds) == 1
        assert (unit in units) == kinds.pop()
    late = [name for unit in made.units for name in [t.node.id for t in unit.tasks]]
    for name, other in itertools.combinations(late, 2):
        if streamed[other] == f"{WAITS}one program with {name}, which waits":
            break
    else:
        pytest.fail("no node waits for another one of its program")
