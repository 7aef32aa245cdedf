"""Which nodes run ahead, and that they run on each group once, in the plan's order."""

import contextlib
import threading
import types

import numpy as np
import pytest
from support.layouts import HOST, LAYOUTS
from support.waiting import HANG

from distflow_jax.config.run_config import Config
from distflow_jax.coordinator.coordinator import merge_parts
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.graph_yaml import load_graph
from distflow_jax.dag.plan_walker import make_runner
from distflow_jax.dag.planner import plan
from distflow_jax.layout import Parts
from distflow_jax.stream.host_nodes import Group, NodesAhead, step_metrics, units_ahead
from distflow_jax.stream.host_thread import HostThread


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo", "remax", "online_dpo"])
def test_rewards_of_built_in_graphs_run_ahead(name):
    built = plan(load_graph(name, Config()), LAYOUTS, ("uid", "prompt"))
    sampled = {t.node.id for t in built.tasks if t.node.role == "ROLLOUT"}
    found = {unit.tasks[0].node.id for unit in units_ahead(built, sampled)}
    assert found == {
        t.node.id
        for t in built.tasks
        if (t.node.role, t.layout.kind) == ("REWARD", "host") and t.node.scope != "batch"
    }
    assert found


def built(*, scope="group", when=None):
    """A score, what follows from it, and nodes that wait for the step."""
    nodes = [
        Node("gen", "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"], ["response"]),
        Node("score", "REWARD", "COMPUTE", ["gen"], ["response"], {"out": "score"}),
        Node(
            *("mean", "REWARD", "COMPUTE", ["score"], ["score"], {"out": "centred"}),
            scope=scope,
            when=when,
        ),
        Node("late", "REWARD", "COMPUTE", ["score"], ["score"], {"out": "x"}, scope="batch"),
        Node("after", "REWARD", "COMPUTE", ["late"], ["x"], {"out": "y"}),
        Node("train", "ACTOR", "COMPUTE", ["mean"], ["centred"], {"out": "z"}, when=when),
    ]
    return plan(Graph("g", nodes), LAYOUTS, ("uid", "prompt"))


@pytest.mark.parametrize(
    "how, ahead",
    [
        ({}, ["score", "mean"]),
        ({"scope": "batch"}, ["score"]),
        ({"when": {"every": 2}}, ["score"]),
        ({"when": {"after": 3}}, ["score"]),
    ],
)
def test_what_waits_for_the_step(how, ahead):
    found = units_ahead(built(**how), {"gen"})
    assert [unit.tasks[0].node.id for unit in found] == ahead


def test_what_reads_the_number_of_the_step_waits_for_it():
    """A group does not know its step when it ends: filter decisions of a region may move it."""
    nodes = [
        Node("gen", "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"], ["response"]),
        Node("score", "REWARD", "COMPUTE", ["gen"], ["response"], {"out": "score"}),
        Node("ramp", "REWARD", "COMPUTE", ["score"], ["score", "step"], {"out": "ramped"}),
        Node("own", "REWARD", "COMPUTE", ["gen"], ["response"], {"out": "steps"}),
    ]
    made = plan(Graph("g", nodes), LAYOUTS, ("uid", "prompt", "step"))
    found = units_ahead(made, {"gen"})
    assert {unit.tasks[0].node.id for unit in found} == {"score", "own"}


def group_of(counter, responses):
    writers = dict.fromkeys((None, "gen", "score", "mean"), HOST)
    uid = np.array([[counter, i] for i in range(len(responses))], np.int64)
    store = FieldStore.of_step(writers, {"uid": uid, "prompt": [None] * len(responses)})
    store.put("gen", "response", responses)
    return Group(counter, store, set())


def score(state, fields, options):
    values = np.array([len(r) for r in fields["response"]], np.float32)
    total = Parts(((float(values.sum()), len(values)),), mean_of)
    return state, {"out": values}, {"score": total, "seen_calls": 1, "size": len(values)}


def mean_of(parts):
    return {"reward/mean": sum(s for s, _ in parts) / sum(n for _, n in parts)}


def centre(state, fields, options):
    return state, {"out": fields["score"] - fields["score"].mean()}, {}


def run_on(groups, stages, until=None):
    units = units_ahead(built(), {"gen"})
    runners = {unit.name: make_runner(unit, stages) for unit in units}
    nodes = NodesAhead(frozenset({"gen"}), units, runners, until)
    assert nodes.ids == {"gen", "score", "mean"}
    for group in groups:
        for unit in units:
            nodes.run_unit(unit, group, contextlib.nullcontext)
        nodes.judge(group)


def test_each_group_gets_what_a_step_would_give_it():
    groups = [group_of(5, ["a", "bbb"]), group_of(3, ["cc", "cccc", ""])]
    run_on(groups, {"score": score, "mean": centre})
    np.testing.assert_allclose(groups[0].store.values["mean", "centred"], [-1, 1])
    np.testing.assert_allclose(groups[1].store.values["mean", "centred"], [0, 2, -2])
    metrics = merge_parts(step_metrics(groups))
    assert metrics == {"reward/mean": 2.0, "seen_calls": 2, "size": 2.5}


def test_a_node_with_a_state_is_refused():
    def counts(state, fields, options):
        return (state or 0) + 1, {"out": np.zeros(1)}, {}

    with pytest.raises(ValueError, match="'score' keeps a state, .* give it scope batch"):
        run_on([group_of(1, ["a"])], {"score": counts, "mean": centre})


def test_a_region_judges_whole_groups():
    def until(columns):
        return np.asarray(columns["score"]) > 1

    groups = [group_of(0, ["aa", "bbb"]), group_of(1, ["a", "bbb"])]
    run_on(groups, {"score": score, "mean": centre}, until)
    assert [group.keep for group in groups] == [True, False]
    with pytest.raises(ValueError, match=r"`until` gave \(1,\) filter decisions for 2 responses"):
        run_on(groups[:1], {"score": score, "mean": centre}, lambda columns: [True])


def test_what_holds_up_a_group_has_a_name():
    """An evaluation that is scored before its nodes begin, and then the first of these."""
    nodes = NodesAhead(frozenset({"gen"}), units_ahead(built(), {"gen"}), {})
    buffer = types.SimpleNamespace(served=())
    host = HostThread(nodes, contextlib.nullcontext, threading.Condition(), buffer)
    group, begun, goes_on = group_of(17, ["a"]), threading.Event(), threading.Event()

    def score():
        begun.set()
        return goes_on.wait(HANG)

    scored = host.call("evaluation of step 4", score)
    assert begun.wait(HANG)
    assert host.waits_for(group) == "evaluation of step 4"
    goes_on.set()
    assert scored.result()
    host.close()
    host.executor.shutdown()
    assert host.waits_for(group) == "score of prompt 17"
