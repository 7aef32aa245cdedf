"""Outlines of groups in a plan's picture: device segments and regions."""

import dataclasses
from collections.abc import Collection, Sequence

from distflow_jax.report.drawing import Line, Point, Shape, Text
from distflow_jax.report.plan_picture.captions import is_region_title
from distflow_jax.report.plan_picture.layered_layout import OUTLINE_PAD, OUTLINE_TITLE

TITLE_SIZE = 10.0
_PAD = OUTLINE_PAD - 3.0  # from an outline to its members
_CLEAR = 26.0  # distance from a rectangle to boxes that are not members


@dataclasses.dataclass(frozen=True)
class Column:
    """A column's x coordinates: start of wires' labels, start and end of boxes."""

    label: float
    box: float
    right: float


@dataclasses.dataclass(frozen=True)
class _Frame:
    """Adjacent members in a column, with the room around them."""

    column: int
    top: float
    bottom: float


def outline(
    title: str,
    members: Collection[str],
    spans: Sequence[Sequence[tuple[str | None, float, float]]],
    columns: Sequence[Column],
) -> tuple[list[Shape], list[Shape]]:
    """(areas, lines and titles): a frame per stretch of columns with adjacent members.

    `spans` are (key, top, bottom) of each column's boxes from top to bottom, with key None for a
    passing wire.
    """
    frames: list[Shape] = []
    titles: list[Shape] = []
    for stretch in _stretches(members, spans):
        points = _rectangle(stretch, columns)
        if _in_the_way(points, members, spans, columns, stretch[0].column):
            points = _staircase(stretch, columns)
        drawn = _drawn(points, title, columns[stretch[0].column].label)
        frames, titles = [*frames, drawn[0]], [*titles, *drawn[1:]]
    return frames, titles


def _stretches(
    members: Collection[str], spans: Sequence[Sequence[tuple[str | None, float, float]]]
) -> list[list[_Frame]]:
    stretches: list[list[_Frame]] = []
    whole = False  # whether the previous column has a single frame
    for number, boxes in enumerate(spans):
        frames: list[_Frame] = []
        adjacent = False
        for key, top, bottom in boxes:
            if key in members:
                start = frames.pop().top if adjacent else top - _PAD - OUTLINE_TITLE
                frames.append(_Frame(number, start, bottom + _PAD))
            adjacent = key in members
        if whole and len(frames) == 1:
            stretches[-1] += frames
        else:
            stretches += [[frame] for frame in frames]
        whole = len(frames) == 1
    return stretches


def _rectangle(stretch: Sequence[_Frame], columns: Sequence[Column]) -> list[Point]:
    left, right = columns[stretch[0].column].label - _PAD, columns[stretch[-1].column].right + _PAD
    top, bottom = min(f.top for f in stretch), max(f.bottom for f in stretch)
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _staircase(stretch: Sequence[_Frame], columns: Sequence[Column]) -> list[Point]:
    """A polygon that slopes only between columns, where wires bend and no text stands."""
    above: list[Point] = []
    below: list[Point] = []
    for frame in stretch:
        column = columns[frame.column]
        left = column.label - (_PAD if frame is stretch[0] else 0.0)
        right = column.right + (_PAD if frame is stretch[-1] else 0.0)
        above += [(left, frame.top), (right, frame.top)]
        below += [(left, frame.bottom), (right, frame.bottom)]
    return above + below[::-1]


def _in_the_way(
    rectangle: Sequence[Point],
    members: Collection[str],
    spans: Sequence[Sequence[tuple[str | None, float, float]]],
    columns: Sequence[Column],
    first: int,
) -> bool:
    """Whether a box that is not a member is inside the rectangle, or a wire crosses its title."""
    (left, above), (right, below) = rectangle[0], rectangle[2]
    for number, (column, boxes) in enumerate(zip(columns, spans, strict=True)):
        if column.right < left or column.label > right:
            continue
        for key, top, bottom in boxes:
            if key is None:
                if number == first and above - 4.0 < top < above + OUTLINE_TITLE + 8.0:
                    return True
            elif key not in members and top - _CLEAR < below and bottom + _CLEAR > above:
                return True
    return False


def outline_style(is_loop: bool) -> tuple[str, str, tuple[float, ...]]:
    """(stroke, fill, dashes)."""
    return ("#be185d", "#fdf2f8", (6.0, 4.0)) if is_loop else ("#94a3b8", "#f8fafc", (2.0, 2.0))


def _drawn(points: list[Point], title: str, x: float) -> list[Shape]:
    is_loop = is_region_title(title)
    stroke, fill, dash = outline_style(is_loop)
    y = points[0][1]
    shapes: list[Shape] = [
        Line(points, fill=fill, closed=True, title=title),
        Line(points, stroke, 1.6 if is_loop else 1.0, dash, closed=True, title=title),
        Text(x, y + 13.0, title, TITLE_SIZE, stroke if is_loop else "#526072"),
    ]
    if is_loop:  # an arrow head to the left, on the lower edge
        (right, bottom), (left, _) = points[-2], points[-1]  # a horizontal section
        tip = (left + right) / 2 - 6.0
        head = [(tip, bottom), (tip + 10.0, bottom - 5.0), (tip + 10.0, bottom + 5.0)]
        shapes.append(Line(head, fill=stroke, closed=True))
    return shapes
