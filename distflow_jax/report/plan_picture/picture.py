"""A plan's picture: boxes for nodes, by depth from left to right, and wires for fields.

    to_svg(draw(plan))                                        # report/drawing.py
    draw(plan, sizes={("rollout", "response"): 98304})        # with the bytes of fields

A node's colour shows its role; a wire's colour and dashes show the move of its fields. The fields
that a node reads stand beside its left edge, on their wire. The picture does not depend on the
order in which nodes are listed, because the plan does not.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from distflow_jax.dag.plan import Plan
from distflow_jax.report.drawing import (
    Drawing,
    Line,
    Point,
    Rect,
    Shape,
    Text,
    curve,
    text_width,
    wrap,
)
from distflow_jax.report.plan_picture.captions import (
    AFTER,
    LOADER,
    Bytes,
    Caption,
    is_region_title,
    loader_lines,
    node_lines,
    outlines,
    role_of,
    wire_captions,
)
from distflow_jax.report.plan_picture.legend import (
    FAINT,
    INK,
    MOVE_STYLES,
    ROLE_COLORS,
    legend_entries,
    outline_style,
    page,
)
from distflow_jax.report.plan_picture.placement import OUTLINE_PAD, Box, PlacedPlan, Wire, place

_PAD, _STRIPE = 9.0, 5.0
_TITLE, _SMALL = 13.0, 10.0  # sizes of text
_LEADING = 13.0  # between base lines of a box's small text
_LABEL_LEADING = 12.0
_LABEL_WIDTH = 150.0  # at which a wire's fields are wrapped
_ARROW, _WING = 7.0, 3.5
_GAP = 70.0  # between columns, where wires bend


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column's x coordinates: start of wires' labels, start and end of boxes."""

    label: float
    box: float
    right: float


def draw(plan: Plan, *, sizes: Bytes | None = None) -> Drawing:
    """Draws a plan; `sizes`: {(source, field): bytes}, shown on wires."""
    labels = {caption: _label(caption) for caption in wire_captions(plan, sizes)}
    boxes = {box.key: box for box in _boxes(plan, labels)}
    wires = [
        Wire(boxes[c.source], boxes[c.target], c.kind, label, _slot_height(label), c.title)
        for c, label in labels.items()
    ]
    placed, columns = place(list(boxes.values()), wires), _columns(boxes.values(), wires)
    shapes: list[Shape] = []
    for title, edges in placed.outlines.items():
        shapes += _outline(title, edges, [b for b in boxes.values() if b.outline == title], columns)
    shapes += _wires(wires, placed, columns)
    roles = role_of(plan)
    for box in boxes.values():
        colors = ROLE_COLORS[roles[box.key]]
        shapes += _box(box, colors, columns[box.column], placed.tops[box.key])
    kinds = {wire.kind for wire in wires}
    loops = bool(plan.region.nodes)
    legend = legend_entries(set(roles.values()), kinds, bool(plan.segments), loops)
    return page(plan, shapes, legend)


# -- sizes ------------------------------------------------------------------------------------


def _label(caption: Caption) -> tuple[str, ...]:
    fields = [f"{field}," for field in caption.fields[:-1]] + [*caption.fields[-1:]]
    return tuple(wrap(fields, _SMALL, _LABEL_WIDTH))


def _slot_height(label: Sequence[str]) -> float:
    return 5.0 + _LABEL_LEADING * max(0.4, len(label))


def _boxes(plan: Plan, labels: Mapping[Caption, Sequence[str]]) -> Iterator[Box]:
    """The loader's box if it has fields, then the nodes' in the order of the plan."""
    outlined = outlines(plan)
    words = [(LOADER, 0, "loader", loader_lines(plan))] if plan.loader_fields else []
    first = len(words)  # column of depth 0
    for number, task in enumerate(plan.tasks, 1):
        words.append((task.node.id, first + task.depth, *node_lines(task, number)))
    for key, column, title, lines in words:
        widths = [text_width(title, _TITLE, bold=True)]
        widths += [text_width(line, _SMALL) for line in lines]
        slots = sum(_slot_height(label) for c, label in labels.items() if c.target == key)
        height = max(30.0 + _LEADING * len(lines), slots + 10.0)
        width = max(widths) + _STRIPE + 2 * _PAD
        yield Box(key, column, title, tuple(lines), width, height, outlined.get(key, ""))


def _columns(boxes: Collection[Box], wires: Iterable[Wire]) -> list[_Column]:
    count = 1 + max(box.column for box in boxes)
    widths, labels = [0.0] * count, [0.0] * count
    for box in boxes:
        width = max(box.width, text_width(box.outline, _SMALL))
        widths[box.column] = max(widths[box.column], width)
    for wire in wires:
        width = max((text_width(line, _SMALL) for line in wire.label), default=0.0)
        labels[wire.target.column] = max(labels[wire.target.column], width + _ARROW + 10.0)
    columns, x = [], 0.0
    for label, width in zip(labels, widths, strict=True):
        columns.append(_Column(x, x + label, x + label + width))
        x = columns[-1].right + _GAP
    return columns


# -- shapes -----------------------------------------------------------------------------------


def _box(box: Box, colors: tuple[str, str], column: _Column, top: float) -> list[Shape]:
    strong, faint = colors
    width = column.right - column.box
    shapes: list[Shape] = [
        Rect(column.box, top, width, box.height, faint, strong, 1.2, radius=5.0),
        Rect(column.box, top, _STRIPE, box.height, strong, radius=2.0),
    ]
    x = column.box + _STRIPE + _PAD
    y = top + (box.height - 30.0 - _LEADING * len(box.lines)) / 2 + 18.0
    shapes.append(Text(x, y, box.title, _TITLE, strong, bold=True))
    for number, line in enumerate(box.lines, 1):
        color = INK if number == 1 else FAINT
        shapes.append(Text(x, y + _LEADING * number + 1.0, line, _SMALL, color))
    return shapes


def _outline(
    title: str, edges: tuple[float, float], members: Iterable[Box], columns: Sequence[_Column]
) -> list[Shape]:
    """A frame around boxes, with its title at the upper left."""
    stroke, fill, dash = outline_style(is_region_title(title))
    top, bottom = edges
    held = [columns[box.column] for box in members]
    left = min(column.label for column in held)
    width = max(column.right for column in held) - left + 2 * OUTLINE_PAD
    return [
        Rect(
            left - OUTLINE_PAD, top, width, bottom - top, fill, stroke, 1.2, dash=dash, title=title
        ),
        Text(left, top + 13.0, title, _SMALL, stroke),
    ]


def _wires(wires: Sequence[Wire], placed: PlacedPlan, columns: Sequence[_Column]) -> list[Shape]:
    """Lines of all wires, then arrow heads and labels. Lines bend only between columns."""
    shapes: list[Shape] = []
    ends: list[Shape] = []
    for wire in sorted(wires, key=lambda wire: wire.kind != AFTER):
        y, column = placed.slots[wire], columns[wire.target.column]
        start = placed.lanes[wire.port].y if wire.is_long else placed.ports[wire.port]
        before = columns[wire.target.column - 1]
        points = curve((before.right, start), (column.label, y))
        tip, back = column.box, column.box - _ARROW
        shapes.append(_line(wire.kind, [*points, (back, y)], wire.title))
        head = [(tip, y), (back, y - _WING), (back, y + _WING)]
        ends.append(Line(head, fill=MOVE_STYLES[wire.kind][0], closed=True))
        line_y = y - 3.5 - _LABEL_LEADING * (len(wire.label) - 1)
        for line in wire.label:
            ends.append(Text(back - 2.0, line_y, line, _SMALL, INK, anchor="end"))
            line_y += _LABEL_LEADING
    for port, lane in placed.lanes.items():
        start = (columns[lane.first - 1].right, placed.ports[port])
        points = curve(start, (columns[lane.first].label, lane.y))
        titles = [wire.title for wire in wires if wire.port == port and wire.is_long]
        points.append((columns[lane.last].right, lane.y))
        shapes.append(_line(port[1], points, "\n".join(titles)))
    return [*shapes, *ends]


def _line(kind: str, points: Sequence[Point], title: str) -> Line:
    color, dash, thickness, _ = MOVE_STYLES[kind]
    return Line(points, color, thickness, dash, title=title)
