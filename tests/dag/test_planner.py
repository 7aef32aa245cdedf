"""A plan has what follows from its graph, and refuses what would depend on luck.

The same plan however a graph is listed: test_random_graphs.py.
"""

import dataclasses
import json

import pytest
from support.layouts import LAYOUTS, MESH

from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.graph_yaml import load_graph
from distflow_jax.dag.planner import plan
from distflow_jax.layout import Layout

WIDE = Layout("mesh", (("fsdp", 8),))


def compute(name, deps=(), reads=(), writes=(), role="ACTOR", **more):
    return Node(name, role, "COMPUTE", deps, reads, writes, **more)


def planned(*nodes, layouts=LAYOUTS, given=("question",), fuse=True):
    return plan(Graph("g", nodes), layouts, given, fuse=fuse)


def test_whatever_matters_changes_the_digest():
    def digest(layouts=LAYOUTS, given=("question",), **changes):
        first = compute("first", writes=["x"], role="ROLLOUT")
        last = compute("last", ["first"], ["x"], ["y"], when={"every": 1})
        return planned(
            first, dataclasses.replace(last, **changes), layouts=layouts, given=given
        ).digest

    digests = [
        digest(),
        digest(id="other"),
        digest(role="CRITIC"),
        digest(type="MODEL_INFERENCE"),
        digest(reads={"inside": "x"}),
        digest(reads=["x", "question"]),
        digest(writes=["z"]),
        digest(model="second"),
        digest(scope="batch"),
        digest(when={"every": 2}),
        digest(fn="a:b"),
        digest(options={"a": 1}),
        digest(options={"a": 2}),
        digest(layouts={**LAYOUTS, "ACTOR": WIDE}),
        digest(layouts={**LAYOUTS, "ROLLOUT": MESH}),
        digest(given=("question", "answer")),
        digest(given={"question": MESH}),
    ]
    assert len(set(digests)) == len(digests)
    assert digest() == digests[0]
    assert digest(when=None) == digests[0]  # always, said in two ways


A = compute("a", writes=["x"])
TRAIN = Node("train", "ACTOR", "MODEL_TRAIN")


@pytest.mark.parametrize(
    "nodes, message",
    [
        ([A, compute("b", ["a"], ["xx"])], "node 'b': reads 'xx', which neither the loader nor"),
        ([A, compute("b", ["a"], ["queston"])], "did you mean 'question'?"),
        ([compute("a", [], ["x"]), compute("b", ["a"], [], ["x"])], "written only later, by 'b'"),
        ([A, compute("b", [], ["x"])], "node 'b': reads 'x', which node 'a' writes, and no dep"),
        ([A, compute("b", [], [], ["x"])], "writes 'x', which node"),
        ([A, compute("b", ["a"], [], ["x"]), compute("c", ["a"], ["x"])], "which node 'b' writes,"),
        (
            [compute("a", writes=["x"], when={"after": 3}), compute("b", ["a"], ["x"])],
            "node 'b': reads 'x' also in steps in which node 'a' does not run",
        ),
        (
            [
                compute("a", writes=["x"], when={"every": 2}),
                compute("b", ["a"], ["x"], when={"every": 3}),
            ],
            "give both the same 'when'",
        ),
        ([TRAIN, Node("infer", "ACTOR", "MODEL_INFERENCE")], "add a dep between them"),
        ([compute("a", model="m"), compute("b", role="CRITIC", model="m")], "uses model 'm' on"),
    ],
)
def test_what_would_depend_on_luck_is_refused(nodes, message):
    for order in (nodes, nodes[::-1]):
        with pytest.raises(ValueError) as caught:
            planned(*order)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


ROLL = compute("roll", [], ["prompt"], ["response", "response_mask"], role="ROLLOUT")
GIVEN = ("uid", "prompt")


@pytest.mark.parametrize(
    "nodes, message",
    [
        ([ROLL, compute("a", ["roll"], ["prompt", "response"])], "where prompts and responses are"),
        ([compute("a", [], ["uid"])], "node 'a': reads uid on fsdp 4 x tensor 2"),
        ([ROLL, compute("a", ["roll"], ["rows"], role="REWARD")], "reads rows on the host, where"),
        ([compute("a", [], [], ["rows"])], "node 'a': writes rows, which is packed of prompt"),
        (
            [compute("a", [], [], ["response", "response_mask"]), compute("b", ["a"], ["rows"])],
            "node 'a': writes 'response' on fsdp 4 x tensor 2, and rows are packed of columns",
        ),
        ([ROLL, compute("a", [], ["rows"])], "reads 'response', which node 'roll' writes, and no"),
        (
            [dataclasses.replace(ROLL, writes=["response"]), compute("a", ["roll"], ["rows"])],
            "node 'a': reads 'response_mask', which neither the loader nor a node upstream",
        ),
    ],
)
def test_responses_are_rows_on_a_mesh_and_columns_on_the_host(nodes, message):
    with pytest.raises(ValueError) as caught:
        planned(*nodes, given=GIVEN)
    assert message in str(caught.value)


def test_rows_come_from_the_last_node_that_writes_responses():
    edit = compute("edit", ["roll"], ["response"], ["response"], role="REWARD")
    result = planned(ROLL, edit, compute("a", ["edit"], ["rows"]), given=GIVEN)
    (edge,) = result.tasks[-1].edges_in
    assert (edge.source, edge.field, edge.move) == ("edit", "rows", "pack")
    assert ("edit", "rows") in result.tasks[-1].frees


def test_a_role_without_a_layout_is_refused():
    with pytest.raises(ValueError, match="node 'a': no layout for CRITIC .*did you mean 'CRITC'"):
        planned(compute("a", role="CRITIC"), layouts={"CRITC": MESH, "ACTOR": MESH})


def test_the_layout_of_a_model_wins_over_that_of_its_role():
    second = compute("b", model="second")
    result = planned(A, second, layouts={**LAYOUTS, "second": WIDE})
    assert {task.node.id: task.layout for task in result.tasks} == {"a": MESH, "b": WIDE}


def test_states_are_keyed_by_model_then_role_then_node():
    result = planned(
        Node("infer", "CRITIC", "MODEL_INFERENCE"),
        Node("judge", "REWARD", "MODEL_INFERENCE", model="strict"),
        compute("critic"),  # called as the model is: another state
    )
    keys = {task.node.id: task.state_key for task in result.tasks}
    assert keys == {"infer": "critic", "judge": "strict", "critic": "node:critic"}


def test_a_conditional_reader_may_run_more_rarely_than_its_writer():
    result = planned(
        compute("a", writes=["x"], when={"every": 2}),
        compute("b", ["a"], ["x"], when={"every": 4, "after": 6}),
    )
    assert [edge.source for edge in result.tasks[1].edges_in] == ["a"]


def test_a_reader_gets_the_last_version_upstream():
    result = planned(
        A,
        compute("b", ["a"], ["x"], ["x"]),
        compute("c", ["b"], ["x"]),
    )
    assert [edge.source for task in result.tasks for edge in task.edges_in] == ["a", "b"]
    assert [task.frees for task in result.tasks] == [
        ((None, "question"),),
        (("a", "x"),),
        (("b", "x"),),
    ]


def test_grpo_has_the_segments_that_one_expects():
    result = plan(load_graph("grpo"), LAYOUTS, {"uid", "prompt"})
    assert [task.node.id for task in result.tasks] == [
        *("rollout", "old_logp", "reference", "reward", "advantage", "actor_train")
    ]
    # the reward lies between; what trains is a program of its own
    assert [[task.node.id for task in segment] for segment in result.segments] == [
        ["old_logp", "reference"],
        ["advantage"],
        ["actor_train"],
    ]
    moves = {(e.field, e.target): e.move for task in result.tasks for e in task.edges_in}
    assert moves["prompt", "rollout"] == "stay"
    assert moves["rows", "old_logp"] == "pack"
    assert moves["advantage", "actor_train"] == "stay"


@pytest.mark.parametrize(
    "change, segments",
    [
        ({}, [["a", "b"]]),
        ({"scope": "group"}, [["a"], ["b"]]),
        ({"role": "CRITIC"}, [["a"], ["b"]]),
        ({"when": {"every": 2}}, [["a"], ["b"]]),
        ({"reads": ["x", "question"]}, [["a", "b"]]),
        ({"reads": ["x", "answer"]}, [["a", "b"]]),  # the host has it before either of them
        ({"type": "MODEL_TRAIN"}, [["a"], ["b"]]),
    ],
)
def test_where_a_segment_ends(change, segments):
    first = compute("a", [], ["question"], ["x"])
    second = dataclasses.replace(compute("b", ["a"], ["x"]), **change)
    result = planned(first, second, given=("question", "answer"))
    assert [[task.node.id for task in segment] for segment in result.segments] == segments


def test_the_text_form_names_every_node_field_and_move():
    result = plan(load_graph("grpo"), LAYOUTS, {"uid", "prompt"})
    text = result.describe()
    for task in result.tasks:
        for word in (task.node.id, task.node.role, task.node.type, str(task.layout)):
            assert word in text
        for field in (*task.node.reads, *task.node.writes):
            assert field in text
    assert "pack: host -> fsdp 4 x tensor 2" in text
    assert result.digest[:12] in text
    assert json.loads(result.to_json())["segments"][0] == ["old_logp", "reference"]
