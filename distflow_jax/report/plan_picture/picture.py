"""A plan's picture: boxes for nodes, by depth from left to right, and wires for fields.

    to_svg(draw(plan))                                        # report/drawing.py
    draw(plan, sizes={("rollout", "response"): 98304})        # with the bytes of fields

A node's colour shows its role; a wire's colour and dashes show the move of its fields. The fields
that a node reads stand beside its left edge, on their wire. The picture does not depend on the
order in which nodes are listed, because the plan does not.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from distflow_jax.dag.plan import Plan
from distflow_jax.report.drawing import Drawing, Line, Rect, Shape, Text, curve, text_width, wrap
from distflow_jax.report.plan_picture.captions import (
    AFTER,
    LOADER,
    Bytes,
    Caption,
    loader_lines,
    node_lines,
    outlines,
    role_of,
    wire_captions,
)
from distflow_jax.report.plan_picture.layered_layout import Arrangement, Box, Wire, arrange
from distflow_jax.report.plan_picture.legend import (
    FAINT,
    INK,
    MOVE_STYLES,
    ROLE_COLORS,
    legend_entries,
    page,
)
from distflow_jax.report.plan_picture.outline import Column, outline

_PAD, _STRIPE = 9.0, 5.0
_TITLE, _SMALL, _LABEL = 13.0, 10.0, 10.0  # sizes of text
_LEADING = 13.0  # between base lines of small text
_LABEL_LEADING = 12.0
_LABEL_WIDTH = 150.0  # at which a wire's fields are wrapped
_ARROW = 7.0


@dataclasses.dataclass(frozen=True)
class _Content:
    """A box's key, text and size."""

    key: str
    column: int
    title: str
    lines: Sequence[str]
    width: float
    height: float


def draw(plan: Plan, *, sizes: Bytes | None = None) -> Drawing:
    """Draws a plan; `sizes`: {(source, field): bytes}, shown on wires."""
    captions, outlined = wire_captions(plan, sizes), outlines(plan)
    labels = {
        _key(c): wrap([f"{f}," for f in c.fields[:-1]] + [*c.fields[-1:]], _LABEL, _LABEL_WIDTH)
        for c in captions
    }
    wires = [
        Wire(*_key(c), 5.0 + _LABEL_LEADING * max(0.4, len(labels[_key(c)]))) for c in captions
    ]
    contents = _contents(plan, wires)
    boxes = [Box(c.key, c.column, c.height, outlined.get(c.key, "")) for c in contents]
    placed = arrange(boxes, wires)
    columns = _columns(contents, labels, placed, outlined)

    shapes: list[Shape] = []
    by_key = {content.key: content for content in contents}
    shapes += _outlines(outlined, by_key, placed, columns)
    shapes += _wires(captions, placed, columns)
    for caption in captions:
        shapes += _label(
            labels[_key(caption)], caption, placed, columns[by_key[caption.target].column]
        )
    roles = role_of(plan)
    for content in contents:
        column = columns[content.column]
        shapes += _box(content, ROLE_COLORS[roles[content.key]], column, placed.tops[content.key])
    kinds = {caption.kind for caption in captions}
    loops = bool(plan.region.nodes)
    legend = legend_entries(set(roles.values()), kinds, bool(plan.segments), loops)
    return page(plan, shapes, legend)


def _key(caption: Caption) -> tuple[str, str, str]:
    return caption.source, caption.target, caption.kind


# -- sizes and places -------------------------------------------------------------------------


def _contents(plan: Plan, wires: Iterable[Wire]) -> list[_Content]:
    """The loader's box if it has fields, then the nodes' in the order of the plan."""
    words = [(LOADER, 0, "loader", loader_lines(plan))] if plan.loader_fields else []
    first = len(words)  # column of depth 0
    for place, task in enumerate(plan.tasks, 1):
        words.append((task.node.id, first + task.depth, *node_lines(task, place)))
    slots: dict[str, float] = {}
    for wire in wires:
        slots[wire.target] = slots.get(wire.target, 0.0) + wire.height
    contents = []
    for key, column, title, lines in words:
        widths = [text_width(title, _TITLE, bold=True)]
        widths += [text_width(line, _SMALL) for line in lines]
        height = 24.0 + _LEADING * len(lines) + 6.0
        height = max(height, slots.get(key, 0.0) + 10.0)
        width = max(widths) + _STRIPE + 2 * _PAD
        contents.append(_Content(key, column, title, lines, width, height))
    return contents


def _columns(
    contents: Iterable[_Content],
    labels: Mapping[tuple[str, str, str], Sequence[str]],
    placed: Arrangement,
    outlined: Mapping[str, str],
) -> list[Column]:
    widths, texts = {}, {}
    column_of = {}
    for content in contents:
        column_of[content.key] = content.column
        width = max(content.width, text_width(outlined.get(content.key, ""), _SMALL))
        widths[content.column] = max(widths.get(content.column, 0.0), width)
    for (_, target, _), lines in labels.items():
        width = max((text_width(line, _LABEL) for line in lines), default=0.0) + _ARROW + 10.0
        texts[column_of[target]] = max(texts.get(column_of[target], 0.0), width)
    columns, x = [], 0.0
    for number in range(len(placed.order)):
        if number:
            falls = [abs(j.end - j.start) for j in placed.links if j.column == number - 1]
            x += 44.0 + min(70.0, 0.15 * max(falls, default=0.0))
        box = x + texts.get(number, 0.0)
        columns.append(Column(x, box, box + widths.get(number, 0.0)))
        x = columns[-1].right
    return columns


# -- shapes -----------------------------------------------------------------------------------


def _box(content: _Content, colors: tuple[str, str], column: Column, top: float) -> list[Shape]:
    strong, faint = colors
    shapes: list[Shape] = [
        Rect(
            column.box,
            top,
            column.right - column.box,
            content.height,
            faint,
            strong,
            1.2,
            radius=5.0,
        ),
        Rect(column.box, top, _STRIPE, content.height, strong, radius=2.0),
    ]
    x = column.box + _STRIPE + _PAD
    y = top + (content.height - 24.0 - _LEADING * len(content.lines) - 6.0) / 2
    shapes.append(Text(x, y + 18.0, content.title, _TITLE, strong, bold=True))
    for number, line in enumerate(content.lines, 1):
        color = INK if number == 1 else FAINT
        shapes.append(Text(x, y + 18.0 + _LEADING * number + 1.0, line, _SMALL, color))
    return shapes


def _outlines(
    outlined: Mapping[str, str],
    contents: Mapping[str, _Content],
    placed: Arrangement,
    columns: Sequence[Column],
) -> list[Shape]:
    """Areas of outlines, then their lines and titles."""
    spans = [
        [(key, top, top + contents[key].height if key else top) for key, top in order]
        for order in placed.order
    ]
    areas: list[Shape] = []
    lines: list[Shape] = []
    for title in sorted(set(outlined.values())):
        members = [key for key, its in outlined.items() if its == title]
        area, line = outline(title, members, spans, columns)
        areas, lines = [*areas, *area], [*lines, *line]
    return [*areas, *lines]


def _wires(
    captions: Iterable[Caption], placed: Arrangement, columns: Sequence[Column]
) -> list[Shape]:
    """Lines of all links, then arrow heads. Lines bend only between columns."""
    shared: dict[tuple[str, str], list[Caption]] = {}
    for caption in captions:
        shared.setdefault((caption.source, caption.kind), []).append(caption)
    lines: list[Shape] = []
    heads: list[Shape] = []
    # wires without fields first, so that moves are drawn on top
    rank = list(MOVE_STYLES)
    for link in sorted(placed.links, key=lambda j: (j.kind != AFTER, rank.index(j.kind))):
        color, dash, thickness, _ = MOVE_STYLES[link.kind]
        here, following = columns[link.column], columns[link.column + 1]
        points = curve((here.right, link.start), (following.label, link.end))
        tip = following.right if link.target is None else following.box
        points.append((tip - (_ARROW if link.target else 0.0), link.end))
        titles = [
            caption.title
            for caption in shared[link.source, link.kind]
            if link.target in (None, caption.target)
        ]
        lines.append(Line(points, color, thickness, dash, title="\n".join(titles)))
        if link.target is not None:
            wing = 3.5
            head = [
                (tip, link.end),
                (tip - _ARROW, link.end - wing),
                (tip - _ARROW, link.end + wing),
            ]
            heads.append(Line(head, fill=color, closed=True))
    return [*lines, *heads]


def _label(
    lines: Sequence[str], caption: Caption, placed: Arrangement, column: Column
) -> list[Shape]:
    """A wire's fields, above its end at the box that reads them."""
    y = placed.slots[_key(caption)] - 3.5 - _LABEL_LEADING * (len(lines) - 1)
    x = column.box - _ARROW - 2.0
    return [
        Text(x, y + _LABEL_LEADING * i, line, _LABEL, INK, anchor="end")
        for i, line in enumerate(lines)
    ]
