"""Random graphs: a valid one has one plan however it is listed, a broken one its message.

Nightly: thousands of random graphs: one plan for a valid graph however it is listed, the right
error for a broken one.
"""

import os
import random
import re
import sys

import pytest
from support.layouts import HOST, LAYOUTS
from support.programs import finished

from distflow_jax.dag.graph import ROLES, SCOPES, Graph, Node, Region
from distflow_jax.dag.planner import plan
from distflow_jax.layout import move_between


def random_nodes(rng):
    """Nodes of a valid graph: each reads only fields written upstream."""
    nodes, upstream = [], {}
    for i in range(rng.randint(2, 10)):
        deps = [node["id"] for node in nodes if rng.random() < 0.3]
        above = set(deps).union(*(upstream[dep] for dep in deps))
        readable = ["question"] + [f for n in nodes if n["id"] in above for f in n["writes"]]
        name = f"n{rng.randint(0, 99)}_{i}"
        nodes.append(
            {
                "id": name,
                "role": rng.choice(ROLES),
                "type": "COMPUTE",
                "deps": deps,
                "reads": rng.sample(readable, rng.randint(0, len(readable))),
                "writes": [f"f{i}_{k}" for k in range(rng.randint(0, 2))],
                "scope": rng.choice(SCOPES),
            }
        )
        upstream[name] = above
    return nodes


def break_one(rng, nodes):
    """Breaks the graph in one way; the message that must come, as a regular expression."""
    node = rng.choice(nodes)
    name = re.escape(node["id"])
    way = rng.choice(("cycle", "dep", "twice", "field", "order", "layout", "role", "region"))
    if way == "cycle":
        node["deps"] = [*node["deps"], node["id"]]
        return rf"node '{name}' waits for itself: {name} -> {name}"
    if way == "dep":
        node["deps"] = [*node["deps"], "nobody"]
        return rf"node '{name}': unknown dep 'nobody'"
    if way == "twice":
        nodes.append(dict(node))
        return rf"node '{name}' occurs twice"
    if way == "field":
        node["reads"] = [*node["reads"], "nothing"]
        return rf"node '{name}': reads 'nothing', which neither the loader nor a node upstream"
    if way == "order":
        for other, field in (("left", "w"), ("right", "r")):
            key = {"w": "writes", "r": "reads"}[field]
            nodes.append({"id": other, "role": "ACTOR", "type": "COMPUTE", key: ["fresh"]})
        return r"node 'right': reads 'fresh', which node 'left' writes, and no dep says which comes"
    if way == "layout":
        node["role"] = "CRITIC"
        return r"node '\w+': no layout for CRITIC"
    if way == "role":
        node["role"] = "ACTR"
        return rf"node '{name}': unknown role 'ACTR' \(did you mean 'ACTOR'"
    nodes.append({"id": "last", "role": "REWARD", "type": "COMPUTE", "deps": [node["id"]]})
    return rf"node 'last': is in a region and waits for '{name}' outside of it"


def build(nodes, regions=()):
    return Graph("g", [Node(**node) for node in nodes], regions)


def planned(nodes, **how):
    return plan(build(nodes), LAYOUTS, {"question"}, **how)


def digest_of(seed):
    return planned(random_nodes(random.Random(seed))).digest


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_graphs(count):
    refused = 0
    for seed in range(count):
        rng = random.Random(seed)
        nodes = random_nodes(rng)
        result = plan(build(nodes), LAYOUTS, {"question"})
        place = {task.node.id: i for i, task in enumerate(result.tasks)}
        assert sorted(place) == sorted(node["id"] for node in nodes)
        for node in nodes:
            assert all(place[dep] < place[node["id"]] for dep in node["deps"])
        for task in result.tasks:
            for edge in task.edges_in:
                assert edge.source is None or place[edge.source] < place[edge.target]
        rng.shuffle(nodes)
        assert plan(build(nodes), LAYOUTS, {"question"}).digest == result.digest
        if seed % 2:
            continue
        message = break_one(rng, nodes)
        refused += 1
        layouts = {k: v for k, v in LAYOUTS.items() if k != "CRITIC" or "CRITIC" not in message}
        with pytest.raises(ValueError, match=message) as caught:
            plan(
                build(nodes, [Region(["last"], "informative")] * ("region" in message)),
                layouts,
                {"question"},
            )
        assert "\n" not in str(caught.value)
    assert refused == count // 2


def test_the_hash_seed_changes_nothing():
    code = "import test_random_graphs as t; print([t.digest_of(s) for s in range(200)])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    texts = {finished("-c", code, env=env | {"PYTHONHASHSEED": seed}).stdout for seed in "12"}
    assert texts == {f"{[digest_of(seed) for seed in range(200)]}\n"}


@pytest.mark.parametrize("seed", range(40))
def test_every_reader_comes_after_its_writer_and_before_the_value_is_freed(seed):
    nodes = random_nodes(random.Random(seed))
    tasks = planned(nodes).tasks
    assert sorted(task.node.id for task in tasks) == sorted(node["id"] for node in nodes)
    alive, done = {(None, "question")}, set()
    for task in tasks:
        assert set(task.node.deps) <= done
        assert {edge.field for edge in task.edges_in} == set(task.node.reads.values())
        for edge in task.edges_in:
            assert (edge.source, edge.field) in alive
            assert edge.move == move_between(edge.source_layout, edge.target_layout)
        done.add(task.node.id)
        alive |= {(task.node.id, field) for field in task.node.writes.values()}
        alive -= set(task.frees)
    assert not alive
    assert sorted((e.source, e.field, e.target) for t in tasks for e in t.edges_out) == sorted(
        (e.source, e.field, e.target) for t in tasks for e in t.edges_in if e.source
    )


@pytest.mark.parametrize("seed", range(40))
def test_segments_are_adjacent_device_tasks_of_one_layout(seed):
    result = planned(random_nodes(random.Random(seed)))
    device_tasks = [task for task in result.tasks if task.layout.kind == "mesh"]
    assert [task for segment in result.segments for task in segment] == device_tasks
    for segment in result.segments:
        places = [result.tasks.index(task) for task in segment]
        assert places == list(range(places[0], places[0] + len(places)))
        assert len({task.layout for task in segment}) == 1
        scopes = [SCOPES.index(task.node.scope) for task in segment]
        assert scopes == sorted(scopes, reverse=True)
        assert len(segment) == 1 or "MODEL_TRAIN" not in {task.node.type for task in segment}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_units_are_all_tasks_in_order_and_only_what_others_read_leaves_them(seed, fuse):
    result = planned(random_nodes(random.Random(seed)), fuse=fuse)
    assert [task for unit in result.units for task in unit.tasks] == list(result.tasks)
    assert len({unit.name for unit in result.units}) == len(result.units)
    assert fuse or all(len(unit.tasks) == 1 for unit in result.units)
    there = {(None, field) for field, _ in result.loader_fields}
    for unit in result.units:
        inside = {task.node.id for task in unit.tasks}
        reads = {(e.source, e.field) for t in unit.tasks for e in t.edges_in}
        assert {(e.source, e.field) for e in unit.inputs} == {
            v for v in reads if v[0] not in inside
        }
        assert len({(e.source, e.field) for e in unit.inputs}) == len(unit.inputs)
        assert reads - set(unit.outputs) - there <= {v for v in reads if v[0] in inside}
        there |= set(unit.outputs)
        assert set(unit.frees) <= there
        there -= set(unit.frees)
    assert not there


def test_a_region_comes_first_and_whole():
    for seed in range(300):
        rng = random.Random(seed)
        nodes = random_nodes(rng)
        roots = [n for n in nodes if not n["deps"] and LAYOUTS[n["role"]] == HOST]
        if not roots:
            continue
        inside = {rng.choice(roots)["id"]}
        for node in nodes:
            if node["deps"] and set(node["deps"]) <= inside and LAYOUTS[node["role"]] == HOST:
                inside.add(node["id"])
        result = plan(build(nodes, [Region(inside, "informative")]), LAYOUTS, {"question"})
        first, after = result.split()
        assert {unit.name for unit in first} == inside
        assert len(first) + sum(len(unit.tasks) for unit in after) == len(nodes)
        assert result.digest != plan(build(nodes), LAYOUTS, {"question"}).digest


@pytest.mark.parametrize(
    "node, region, message",
    [
        ({"role": "ACTOR"}, {}, "node 'b': runs on fsdp 4 x tensor 2, but nodes of a region run"),
        ({"when": {"every": 2}}, {}, "node 'b': has a 'when' inside a region"),
        ({}, {"nodes": ["a", "c"]}, "region: unknown node 'c'"),
        ({}, {"nodes": []}, "region: nodes must name at least one node"),
        ({}, {"nodes": "a"}, "region: nodes must be a list of node ids, got 'a'"),
        ({}, {"until": 3}, "until must be a name or 'module:function', got 3"),
        ({}, {"max_rounds": 0}, "max_rounds must be an integer from 1 to 2147483647, got 0"),
    ],
)
def test_a_region_that_cannot_be_is_refused(node, region, message):
    nodes = [
        {"id": "a", "role": "ROLLOUT", "type": "COMPUTE"},
        {"id": "b", "role": "REWARD", "type": "COMPUTE", "deps": ["a"], **node},
    ]
    with pytest.raises(ValueError, match=re.escape(message)):
        made = Region(**{"nodes": ["a", "b"], "until": "informative", **region})
        plan(build(nodes, [made]), LAYOUTS, {"question"})


def test_who_decides_what_stays_is_ordered_against_all():
    keep = {"id": "keep", "role": "REWARD", "type": "COMPUTE", "writes": ["keep"]}
    other = {"id": "other", "role": "REWARD", "type": "COMPUTE"}
    with pytest.raises(ValueError, match="node 'other': node 'keep' writes 'keep', which drops r"):
        plan(build([keep, other]), LAYOUTS, {"question"})
    plan(build([keep, other | {"deps": ["keep"]}]), LAYOUTS, {"question"})
