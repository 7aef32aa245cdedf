"""Layered layout: boxes in columns, and wires between them without overlaps.

A wire leads from a box to boxes in later columns. In each column that it passes it has a place of
its own, like a box (a *track*), which wires of one source and kind share. Wires bend only in the
gaps between columns. All text is inside a box or beside its left edge, where each wire that ends
there has a slot: by construction no line crosses a text or a box.

The order within a column is by barycentres, heights are by least squares under given distances
(isotonic regression); both depend only on the keys and the order of the boxes.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

TRACK_GAP, BOX_GAP = 11.0, 22.0  # between neighbours in a column
OUTLINE_PAD, OUTLINE_TITLE = 10.0, 13.0  # from an outline to its members; height of its title
_SWEEPS = 12
_TRACK_WEIGHT = 4.0  # a wire to a box weighs 1: long wires stay straight


@dataclasses.dataclass(frozen=True)
class Wire:
    """A line from a box to another; `height` is that of its slot at the target's left edge."""

    source: str
    target: str
    kind: str
    height: float


@dataclasses.dataclass(frozen=True)
class Box:
    """A box to place; boxes with the same `outline` stay together. "": it has none."""

    key: str
    column: int
    height: float
    outline: str = ""


@dataclasses.dataclass(frozen=True)
class WireSection:
    """A section of wires of one source and kind, from a column to the next.

    It ends at the box `target`, or, if that is None, at the wires' track in the next column.
    """

    source: str
    kind: str
    column: int  # of its start
    start: float
    end: float
    target: str | None


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Tops of boxes, bottoms of wires' slots by (source, target, kind), and the links.

    `order` has (key, top) of each column's items from top to bottom; a track's key is None.
    """

    tops: Mapping[str, float]
    slots: Mapping[tuple[str, str, str], float]
    links: Sequence[WireSection]
    order: Sequence[Sequence[tuple[str | None, float]]]


@dataclasses.dataclass
class _Item:
    """A box, or a track, which has the height of a line."""

    key: tuple[str, ...]
    column: int
    height: float
    outline: str
    box: str | None
    y: float = 0.0  # top
    into: list["_Joint"] = dataclasses.field(default_factory=list)
    out: list["_Joint"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Joint:
    """Two items of neighbouring columns that a link joins, at heights below their tops."""

    left: _Item
    right: _Item
    wire: Wire | None  # the wire that ends at `right`
    kind: str
    source: str
    leave: float = 0.0
    arrive: float = 0.0


def arrange(boxes: Sequence[Box], wires: Iterable[Wire]) -> Arrangement:
    """Places all boxes. Boxes of a column should be listed in the order in which they run.

    Wires must lead to later columns.
    """
    columns, joints = _items(boxes, sorted(wires, key=dataclasses.astuple))
    columns = _order(columns, joints)
    _set_ports(columns)
    _set_heights(columns)
    _close_gaps(columns, joints)
    return Arrangement(
        tops={item.box: item.y for column in columns for item in column if item.box is not None},
        slots={
            (j.wire.source, j.wire.target, j.wire.kind): j.right.y + j.arrive
            for j in joints
            if j.wire is not None
        },
        links=[
            WireSection(
                j.source,
                j.kind,
                j.left.column,
                j.left.y + j.leave,
                j.right.y + j.arrive,
                j.right.box,
            )
            for j in joints
        ],
        order=[[(item.box, item.y) for item in column] for column in columns],
    )


def _items(boxes: Sequence[Box], wires: Sequence[Wire]) -> tuple[list[list[_Item]], list[_Joint]]:
    """Boxes and tracks by column, and the joints between them."""
    columns: list[list[_Item]] = [[] for _ in range(1 + max(box.column for box in boxes))]
    placed: dict[str, _Item] = {}
    for box in boxes:
        item = _Item((box.key,), box.column, box.height, box.outline, box.key)
        placed[box.key] = item
        columns[box.column].append(item)
    joints: list[_Joint] = []
    tracks: dict[tuple[str, str, int], _Item] = {}

    def join(left: _Item, right: _Item, wire: Wire, ends: bool) -> None:
        joint = _Joint(left, right, wire if ends else None, wire.kind, wire.source)
        left.out.append(joint)
        right.into.append(joint)
        joints.append(joint)

    for wire in wires:
        left, target = placed[wire.source], placed[wire.target]
        assert left.column < target.column, f"{wire} does not lead forward"
        for column in range(left.column + 1, target.column):
            key = (wire.source, wire.kind, column)
            if key not in tracks:
                tracks[key] = _Item(("", wire.source, wire.kind), column, 1.0, "", None)
                columns[column].append(tracks[key])
                join(left, tracks[key], wire, ends=False)
            left = tracks[key]
        join(left, target, wire, ends=True)
    return columns, joints


# -- order within a column --------------------------------------------------------------------


def _order(columns: list[list[_Item]], joints: list[_Joint]) -> list[list[_Item]]:
    """The order with the fewest crossings found in sweeps from left to right and back."""
    best, least = columns, None
    columns = [_group(column, {item.key: i for i, item in enumerate(column)}) for column in columns]
    for sweep in range(_SWEEPS):
        crossings = _crossings(columns, joints)
        if least is None or crossings < least:
            best, least = [list(column) for column in columns], crossings
        forward = sweep % 2 == 0
        for number in range(len(columns)) if forward else reversed(range(len(columns))):
            neighbour = number - 1 if forward else number + 1
            if not 0 <= neighbour < len(columns):
                continue
            place = {id(item): i for i, item in enumerate(columns[neighbour])}
            scale = len(columns[number]) / max(1, len(columns[neighbour]))
            wanted = {}
            for i, item in enumerate(columns[number]):
                others = [j.left for j in item.into] if forward else [j.right for j in item.out]
                near = [place[id(other)] for other in others]
                wanted[item.key] = sum(near) / len(near) * scale if near else float(i)
            columns[number] = _group(columns[number], wanted)
    return best


def _group(items: Sequence[_Item], wanted: Mapping[tuple[str, ...], float]) -> list[_Item]:
    """Items sorted by their wanted places, with the items of an outline together."""
    groups: dict[tuple[str, ...], list[_Item]] = {}
    for item in items:
        name = ("", item.outline) if item.outline else item.key
        groups.setdefault(name, []).append(item)

    def place(name: tuple[str, ...]) -> tuple[float, tuple[str, ...]]:
        mean = sum(wanted[item.key] for item in groups[name]) / len(groups[name])
        return round(mean, 6), name

    ordered = []
    for name in sorted(groups, key=place):
        ordered += sorted(groups[name], key=lambda item: (round(wanted[item.key], 6), item.key))
    return ordered


def _crossings(columns: Sequence[Sequence[_Item]], joints: Iterable[_Joint]) -> int:
    place = {id(item): i for column in columns for i, item in enumerate(column)}
    gaps: dict[int, list[tuple[int, int]]] = {}
    for joint in joints:
        ends = (place[id(joint.left)], place[id(joint.right)])
        gaps.setdefault(joint.left.column, []).append(ends)
    count = 0
    for ends in gaps.values():
        seen: list[int] = []
        for _, right in sorted(ends):
            count += len(seen) - bisect.bisect_right(seen, right)
            bisect.insort(seen, right)
    return count


# -- heights ----------------------------------------------------------------------------------


def _set_ports(columns: Sequence[Sequence[_Item]]) -> None:
    """Sets the heights at which wires leave and enter boxes, in the order of their other ends."""
    place = {id(item): i for column in columns for i, item in enumerate(column)}
    for item in (item for column in columns for item in column):
        if item.box is None:
            continue
        item.into.sort(key=lambda j: (place[id(j.left)], j.source, j.kind))
        y = (item.height - sum(j.wire.height for j in item.into)) / 2
        for joint in item.into:
            y += joint.wire.height
            joint.arrive = y
        kinds: dict[str, list[int]] = {}
        for joint in item.out:
            kinds.setdefault(joint.kind, []).append(place[id(joint.right)])
        order = sorted(kinds, key=lambda kind: (sum(kinds[kind]) / len(kinds[kind]), kind))
        for joint in item.out:
            share = (1 + order.index(joint.kind)) / (1 + len(order))
            joint.leave = item.height * share


def _set_heights(columns: Sequence[Sequence[_Item]]) -> None:
    """Sets the tops of all items: wires as level as the distances within a column allow."""
    for column in columns:
        _fall(column, [0.0] * len(column), [1.0] * len(column))
        middle = (column[-1].y + column[-1].height) / 2 if column else 0.0
        for item in column:
            item.y -= middle
    for sweep in range(_SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            wishes, weights = [], []
            for item in column:
                pulls = [_pull(j.left, j.left.y + j.leave - j.arrive) for j in item.into]
                pulls += [_pull(j.right, j.right.y + j.arrive - j.leave) for j in item.out]
                weight = sum(w for _, w in pulls)
                wishes.append(sum(y * w for y, w in pulls) / weight if pulls else item.y)
                weights.append(weight if pulls else 0.1)
            _fall(column, wishes, weights)


def _close_gaps(columns: Sequence[Sequence[_Item]], joints: Iterable[_Joint]) -> None:
    """Moves the tops to begin at 0, and removes gaps that no item or wire crosses."""
    items = [item for column in columns for item in column]
    spans = [(item.y, item.y + item.height) for item in items]
    for joint in joints:
        ends = (joint.left.y + joint.leave, joint.right.y + joint.arrive)
        spans.append((min(ends), max(ends)))
    outlined = any(item.outline for item in items)
    gap = BOX_GAP + outlined * (2 * OUTLINE_PAD + OUTLINE_TITLE)
    cuts: list[tuple[float, float]] = []  # (height, distance by which items below it move up)
    reached = None
    for top, bottom in sorted(spans):
        if reached is None:
            cuts.append((top, top))
        elif top > reached + gap:
            cuts.append((top, cuts[-1][1] + top - reached - gap))
        reached = bottom if reached is None else max(reached, bottom)
    for item in items:
        item.y -= [cut for top, cut in cuts if top <= item.y][-1]


def _pull(other: _Item, y: float) -> tuple[float, float]:
    return y, _TRACK_WEIGHT if other.box is None else 1.0


def _fall(column: Sequence[_Item], wishes: Sequence[float], weights: Sequence[float]) -> None:
    """Sets the tops nearest to the wishes, by weighted least squares, under order and distances.

    Less the distances, tops may only grow: neighbours that would shrink are pooled.
    """
    offsets, offset = [], 0.0
    for i, item in enumerate(column):
        offset += _distance(column[i - 1], item) + column[i - 1].height if i else 0.0
        offsets.append(offset)
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of items
    for wish, weight, offset in zip(wishes, weights, offsets, strict=True):
        pools.append((wish - offset, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, v, m), (b, w, n) = pools.pop(-2), pools.pop()
            pools.append(((a * v + b * w) / (v + w), v + w, m + n))
    levels = [mean for mean, _, count in pools for _ in range(count)]
    for item, level, offset in zip(column, levels, offsets, strict=True):
        item.y = level + offset


def _distance(above: _Item, below: _Item) -> float:
    """Distance between two neighbours, with room for outlines that end or begin there."""
    base = TRACK_GAP if above.box is None or below.box is None else BOX_GAP
    if above.outline == below.outline:
        return base
    ending, beginning = bool(above.outline), bool(below.outline)
    return base + ending * OUTLINE_PAD + beginning * (OUTLINE_PAD + OUTLINE_TITLE)
