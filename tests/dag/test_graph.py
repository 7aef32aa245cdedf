"""A graph is checked when it is made, and is the same in Python and in YAML."""

import dataclasses
import random

import pytest
from support.graph_text import read_graph, write_graph

from distflow_jax.dag.graph import Graph, Node, When, find_cycle

TWO = """
name: two
nodes:
  - {id: a, role: ROLLOUT, type: MODEL_INFERENCE, reads: [prompt], writes: [response]}
  - id: b
    role: REWARD
    type: COMPUTE
    deps: [a]
    reads: {text: response}
    writes: [score]
    model: judge
    scope: group
    when: {every: 2, after: 3}
    fn: my_module:my_function
    options: {lr: 1e-6, names: [x, "1e-6"], deep: {a: null, b: true}}
"""


def in_python():
    return Graph(
        "two",
        [
            Node("a", "ROLLOUT", "MODEL_INFERENCE", reads=["prompt"], writes=["response"]),
            Node(
                "b",
                "REWARD",
                "COMPUTE",
                deps=["a"],
                reads={"text": "response"},
                writes=["score"],
                model="judge",
                scope="group",
                when=When(every=2, after=3),
                fn="my_module:my_function",
                options={"lr": 1e-6, "names": ("x", "1e-6"), "deep": {"a": None, "b": True}},
            ),
        ],
    )


def node(name="a", **changes):
    return Node(**{"id": name, "role": "ACTOR", "type": "COMPUTE", **changes})


def test_yaml_and_python_say_the_same(tmp_path):
    graph = in_python()
    assert read_graph(TWO) == graph
    assert read_graph(write_graph(graph)) == graph
    file = tmp_path / "two.yaml"
    file.write_text(write_graph(graph))
    assert read_graph(file) == read_graph(str(file)) == graph


def test_yaml_may_merge_one_node_into_another():
    text = """
name: g
nodes:
  - &first {id: a, role: ACTOR, type: COMPUTE}
  - {<<: *first, id: b, deps: [a]}
"""
    assert read_graph(text) == Graph("g", [node("a"), node("b", deps=["a"])])


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("reads: {text", "read: {text", "node 'b': unknown key 'read' (did you mean 'reads'?"),
        ("name: two", "name: two\nregion: []", "unknown key 'region' (did you mean 'regions'"),
        ("id: b", "deps: [a]", "line 8: key 'deps' is given twice"),
        ("id: b", "model_: x", "node number 2: unknown key 'model_'"),
        ("- id: b\n    role", "- role", "node number 2: 'id' is missing"),
        ("id: b", "id: no", "node id False must be a string"),
        ("id: b", "id: 7", "node id 7 must be a string"),
        ("role: REWARD", "role: REWRD", "node 'b': unknown role 'REWRD' (did you mean 'REWARD'?"),
        ("type: COMPUTE", "type: [COMPUTE]", "node 'b': unknown type ['COMPUTE']"),
        ("scope: group", "scope: groups", "node 'b': unknown scope 'groups' (did you mean 'group'"),
        ("deps: [a]", "deps: a", "node 'b': deps must be a list of names, got 'a': write [a]"),
        ("deps: [a]", "deps:", "node 'b': deps must be a list of names, got None: write []"),
        ("deps: [a]", "deps: [aa]", "node 'b': unknown dep 'aa' (did you mean 'a'?"),
        ("deps: [a]", "deps: [a, a]", "node 'b': deps names 'a' twice"),
        ("deps: [a]", "deps: [b]", "node 'b' waits for itself: b -> b"),
        ("{text: response}", "{text: 1}", "node 'b': reads must hold names"),
        ("writes: [score]", "writes: {x: s, y: s}", "node 'b': writes one field under two names"),
        ("every: 2", "ever: 2", "node 'b': unknown key 'ever' in when (did you mean 'every'?"),
        ("every: 2", "every: 0", "node 'b': when.every must be an integer from 1 to"),
        ("every: 2", "every: true", "when.every must be an integer"),
        ("{every: 2, after: 3}", "5", "node 'b': when must be a map {every, after}, got 5"),
        ("my_module:my_function", "'my_module:'", "node 'b': fn must be 'module:function'"),
        ("options: {", "options: {1: 2, ", "key '1' must be a string"),
        ("lr: 1e-6", "lr: .nan", "node 'b': options must be plain JSON values"),
        ("model: judge", "model: 'my judge'", "node 'b': model must hold names"),
        ("id: b", "id: a", "node 'a' occurs twice"),
        ("nodes:", "nodes: {}\nnode:", "graph: unknown key 'node' (did you mean 'nodes'?"),
    ],
)
def test_a_mistake_in_yaml_is_named(old, new, message):
    assert TWO.count(old) >= 1
    head, _, tail = TWO.rpartition(old)  # the last place is node b
    with pytest.raises(ValueError) as caught:
        read_graph(head + new + tail)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["\n", "just\n a string", "name: x\nnodes: 3", "name: x\nnodes: []\n"]
)
def test_what_is_no_graph_is_refused(text):
    with pytest.raises(ValueError, match="graph"):
        read_graph(text)


def test_broken_yaml_names_the_line():
    with pytest.raises(ValueError, match="line 4"):
        read_graph("name: x\nnodes:\n- {id: a\n- {id: b}\n")


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match="nowhere.yaml"):
        read_graph("nowhere.yaml")


def test_options_that_yaml_cannot_hold_are_refused():
    for options in ({"f": print}, {"a": {1: 2}}, [1]):
        with pytest.raises(ValueError, match="node 'a': options"):
            node(options=options)


def test_a_cycle_is_printed_in_order():
    nodes = [node("a", deps=["c"]), node("b", deps=["a"]), node("c", deps=["b"]), node("d")]
    with pytest.raises(ValueError, match="a -> c -> b -> a"):
        Graph("loop", nodes)


def test_find_cycle_finds_one_exactly_where_there_is_one():
    rng = random.Random(0)
    for _ in range(200):
        size = rng.randint(1, 8)
        forward = {str(i): [str(j) for j in range(i) if rng.random() < 0.4] for i in range(size)}
        assert find_cycle(forward) == []
        a, b = sorted(rng.choices(range(size), k=2))
        closed = {**forward, str(a): [*forward[str(a)], str(b)]}
        closed[str(b)] = [*closed[str(b)], str(a)]
        cycle = find_cycle(closed)
        assert cycle[0] == cycle[-1] and len(cycle) > 1
        assert all(after in closed[before] for before, after in zip(cycle, cycle[1:], strict=False))


def test_when_counts_steps_from_one():
    assert [step for step in range(1, 8) if When().active(step)] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step in range(1, 8) if When(after=4).active(step)] == [5, 6, 7]
    assert [step for step in range(1, 12) if When(every=3, after=2).active(step)] == [5, 8, 11]


def test_when_implies_is_inclusion_of_steps():
    every = [When(e, a) for e in range(1, 7) for a in range(7)]
    for one in every:
        for other in every:
            included = all(other.active(s) for s in range(1, 120) if one.active(s))
            assert one.implies(other) == included, (one, other)


def test_a_sampler_whose_responses_are_read_as_rows_alone_stays():
    nodes = [
        Node("rollout", "ROLLOUT", "MODEL_INFERENCE", (), ["uid"], ["response", "rollout_logp"]),
        Node("judge", "REWARD", "MODEL_INFERENCE", ["rollout"], ["rows"], ["score"]),
        Node("train", "ACTOR", "MODEL_TRAIN", ["judge"], ["score"], may_read=["rollout_logp"]),
    ]
    settled = Graph("judged", nodes).settle({"train": []})
    assert [node.id for node in settled.nodes] == ["rollout", "judge", "train"]
    unread = dataclasses.replace(nodes[2], reads=["uid"], deps=["rollout"])
    assert Graph("unread", [nodes[0], unread]).settle({"train": []}).nodes[0].id == "train"
