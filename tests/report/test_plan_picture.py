"""A picture shows all of a plan, legibly, and the same one however the graph is listed."""

import itertools
import random
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from distflow_jax.dag.graph import ROLES, SCOPES, Graph, Node, Region
from distflow_jax.dag.graph_yaml import load_graph
from distflow_jax.dag.planner import plan
from distflow_jax.layout import Layout
from distflow_jax.report.drawing import Line, Rect, Text, to_svg
from distflow_jax.report.plan_picture.captions import AFTER, wire_captions
from distflow_jax.report.plan_picture.picture import draw

HOST, PAIRS = Layout("host"), Layout("host", (("hosts", 2),))
MESH = Layout("mesh", (("fsdp", 4), ("tensor", 2)))
WIDE = Layout("mesh", (("fsdp", 8),))
LAYOUTS = {"ACTOR": MESH, "CRITIC": WIDE, "REFERENCE": MESH, "REWARD": HOST, "ROLLOUT": PAIRS}
SEEDS = range(200)


def random_nodes(rng):
    """1 to 40 nodes, sparse or dense, with names of all lengths; not all of them joined."""
    count = rng.choice([1, 2, 3, 4, 5, 6, 8, 10, 12, 12, 16, 20, 40])
    density = rng.choice([0.5, 1.5, 4.0]) / max(4, count)
    nodes, upstream = [], {}
    for i in range(count):
        deps = [node.id for node in nodes if rng.random() < density]
        above = set(deps).union(*(upstream[dep] for dep in deps))
        readable = ["question"] + [f for n in nodes if n.id in above for f in n.writes.values()]
        nodes.append(
            Node(
                f"n{i}_{'mW' * rng.randint(0, 12)}",
                rng.choice(ROLES),
                "COMPUTE",
                deps,
                reads=rng.sample(readable, rng.randint(0, min(6, len(readable)))),
                writes=[f"f{i}_{k}{'_long' * rng.randint(0, 6)}" for k in range(rng.randint(0, 4))],
                scope=rng.choice(SCOPES),
                when=rng.choice([None, {"every": 1, "after": 0}]),
                fn=rng.choice([None, "some_module.of_mine:a_function"]),
            )
        )
        upstream[nodes[-1].id] = above
    return nodes


def planned(nodes, repeated=()):
    """The plan of nodes, some of which a region repeats."""
    regions = [Region(repeated, "informative")] if repeated else []
    fields = dict.fromkeys(("uid", "prompt", "question"), HOST)
    return plan(Graph("g", nodes, regions=regions), LAYOUTS, fields)


def random_case(seed):
    rng = random.Random(seed)
    nodes = random_nodes(rng)
    return planned(nodes, repeatable(nodes)[: rng.randint(0, 6)] if seed % 3 == 0 else ())


def repeatable(nodes):
    """Ids of host nodes that wait for nothing but each other."""
    found, fields = [], {"question"}
    for node in nodes:
        own = {*node.deps} <= {*found} and fields.issuperset(node.reads.values())
        if own and node.when is None and LAYOUTS[node.role].kind == "host":
            found.append(node.id)
            fields |= {*node.writes.values()}
    return found


def boxes_of(drawing):
    """(left, top, right, bottom) of nodes and loader, without legend marks and stripes."""
    rects = [s for s in drawing.shapes if isinstance(s, Rect) and s.stroke != "none" and not s.dash]
    return np.array([(r.x, r.y, r.x + r.width, r.y + r.height) for r in rects if r.width > 17])


def texts_of(drawing):
    return [shape for shape in drawing.shapes if isinstance(shape, Text)]


def pieces_of(drawing):
    """The straight pieces of all wires, as (x0, y0, x1, y1)."""
    lines = [s for s in drawing.shapes if isinstance(s, Line) and not s.closed]
    ends = [a + b for line in lines for a, b in itertools.pairwise(line.points)]
    return np.array(ends).reshape(-1, 4)


def overlap(a, b):
    """[A, B]: whether rectangles share more than an edge."""
    a, b = a[:, None], b[None]
    return ((a[..., :2] < b[..., 2:]) & (b[..., :2] < a[..., 2:])).all(-1)


def within(a, b):
    """[A, B]: whether rectangle a lies in rectangle b."""
    a, b = a[:, None], b[None]
    return ((a[..., :2] >= b[..., :2]) & (a[..., 2:] <= b[..., 2:])).all(-1)


def entered(pieces, boxes):
    """Pairs of a piece and a box into whose inside it comes. Liang and Barsky's clipping."""
    around = np.concatenate(
        [np.minimum(pieces[:, :2], pieces[:, 2:]), np.maximum(pieces[:, :2], pieces[:, 2:])], axis=1
    )
    boxes = boxes + np.array([0.5, 0.5, -0.5, -0.5])
    near, box = np.nonzero(overlap(around, boxes))
    start, delta = pieces[near, :2], pieces[near, 2:] - pieces[near, :2]
    delta = np.where(np.abs(delta) < 1e-9, 1e-9, delta)
    ends = np.stack([(boxes[box, :2] - start) / delta, (boxes[box, 2:] - start) / delta])
    first, last = ends.min(0).max(-1), ends.max(0).min(-1)
    inside = np.maximum(first, 0.0) < np.minimum(last, 1.0)
    return list(zip(near[inside], box[inside], strict=True))


def test_entered_tells_a_line_through_a_box_from_one_beside_it():
    box = np.array([[10.0, 10.0, 20.0, 20.0]])
    through = [[0, 15, 30, 15], [15, 0, 15, 30], [5, 5, 25, 25], [12, 12, 13, 13], [0, 25, 15, 8]]
    beside = [[0, 5, 30, 5], [0, 10, 30, 10], [10, 0, 10, 30], [0, 18, 8, 40], [0, 18, 18, 0]]
    pieces = np.array(through + beside, dtype=float)
    found = {int(piece) for piece, _ in entered(pieces, box)}
    assert found == set(range(len(through)))


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_covers_anything(seed):
    the_plan = random_case(seed)
    drawing = draw(the_plan)
    boxes, pieces = boxes_of(drawing), pieces_of(drawing)
    texts = np.array([text.box() for text in texts_of(drawing)])
    assert len(boxes) == len(the_plan.tasks) + 1
    assert (overlap(boxes, boxes) == np.eye(len(boxes), dtype=bool)).all()
    assert (overlap(texts, texts) == np.eye(len(texts), dtype=bool)).all()
    assert (overlap(texts, boxes) == within(texts, boxes)).all()
    assert within(texts, np.array([[0, 0, drawing.width, drawing.height]])).all()
    assert not entered(pieces, np.concatenate([boxes, texts]))


@pytest.mark.parametrize("seed", range(15))
def test_the_picture_does_not_depend_on_the_order_of_listing(seed):
    rng = random.Random(seed)
    nodes = random_nodes(rng)
    repeated = repeatable(nodes)[:2]
    first = planned(nodes, repeated)
    rng.shuffle(nodes)
    again = planned(nodes, repeated[::-1])
    assert to_svg(draw(first)) == to_svg(draw(again))


@pytest.mark.parametrize("seed", range(30))
def test_every_node_field_and_order_is_shown(seed):
    the_plan = random_case(seed)
    svg = to_svg(draw(the_plan))
    texts = [element.text for element in ET.fromstring(svg) if element.tag.endswith("}text")]
    words = {word.rstrip(",") for text in texts for word in text.split()}
    for task in the_plan.tasks:
        fields = {*task.node.writes.values(), *task.node.reads.values()}
        assert {task.node.id, task.node.role, *fields} <= words
    # each edge is in one wire, and whatever a node waits for leads to it
    captions = wire_captions(the_plan)
    deferred = sorted((c.source, f, c.target, c.kind) for c in captions for f in c.fields)
    edges = [e for task in the_plan.tasks for e in task.edges_in]
    assert deferred == sorted((e.source or "(loader)", e.field, e.target, e.move) for e in edges)
    before = {}
    for task in the_plan.tasks:
        sources = {c.source for c in captions if c.target == task.node.id}
        before[task.node.id] = sources.union(*(before.get(s, set()) for s in sources))
        assert set(task.node.deps) <= before[task.node.id]


def test_text_is_no_wider_than_measured():
    font, measure = FontProperties(family="DejaVu Sans", size=20), TextToPath()
    for char in map(chr, range(32, 127)):
        text = Text(0, 0, f"a{char}b{char}" * 5, size=20)
        width, _, _ = measure.get_text_width_height_descent(text.text, font, ismath=False)
        assert width <= text.box()[2]


def test_bytes_stand_at_the_fields_they_are_known_of():
    the_plan = planned(load_graph("grpo").settle({"actor_train": {"ref_logp"}}).nodes)
    sizes = {("rollout", "rows"): 1_234_567, (None, "prompt"): 512}
    (caption,) = [
        c
        for c in wire_captions(the_plan, sizes)
        if (c.source, c.target) == ("rollout", "reference")
    ]
    assert caption.fields == ("rows 1.2 MiB",)
    svg = to_svg(draw(the_plan, sizes=sizes))
    assert "rows 1.2 MiB" in svg and "prompt 512 B" in svg


def test_a_dep_that_carries_nothing_is_drawn_unless_others_imply_it():
    node = ("ACTOR", "COMPUTE")
    the_plan = planned([Node("a", *node), Node("b", *node, ["a"]), Node("c", *node, ["a", "b"])])
    found = {(c.source, c.target, c.kind) for c in wire_captions(the_plan)}
    assert found == {("a", "b", AFTER), ("b", "c", AFTER)}


def test_a_loop_has_an_outline_around_its_nodes():
    the_plan = planned(load_graph("grpo").settle({}).nodes, ["rollout", "reward"])
    drawing, title = draw(the_plan), "loop: until informative"
    (frame,) = [s for s in drawing.shapes if isinstance(s, Rect) and s.title == title]
    held = [
        text.text
        for text in texts_of(drawing)
        if 0 < text.x - frame.x < frame.width and 0 < text.y - frame.y < frame.height and text.bold
    ]
    assert held == ["1. rollout", "2. reward"]


def test_the_svg_is_well_formed_and_refers_to_nothing():
    name = "<script>&\"'\x00\x1b]]>"
    svg = to_svg(
        draw(
            plan(
                Graph(name, load_graph("grpo").nodes),
                LAYOUTS,
                dict.fromkeys(("uid", "prompt", "question"), HOST),
            )
        ),
        name,
    )
    assert {element.tag for element in ET.fromstring(svg).iter()} == {
        "{http://www.w3.org/2000/svg}" + tag
        for tag in ("svg", "rect", "text", "polyline", "polygon", "title")
    }
    assert not re.search(r"href|src=|url\(|@import|<style|<image", svg)
    assert svg.count("http") == 1
