"""Places of boxes and wires: columns by depth, and lanes above all boxes.

A wire to the next column bends in the gap before it. One that goes further takes a lane above all
boxes, which wires of one source and kind share, and comes down in the gap before its target. All
text is inside a box or beside its left edge, where each wire that ends there has a slot: no line
crosses a text or a box. The boxes of an outline are placed together, and no other stands between.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

BOX_GAP, LANE_GAP = 22.0, 11.0  # between neighbours
OUTLINE_PAD, OUTLINE_TITLE = 7.0, 16.0  # from an outline to its boxes; height of its title


@dataclasses.dataclass(frozen=True)
class Box:
    """A box with its text; boxes with the same `outline` stay together. "": none."""

    key: str
    column: int
    title: str
    lines: tuple[str, ...]
    width: float
    height: float
    outline: str


@dataclasses.dataclass(frozen=True)
class Wire:
    """A line from a box to one of a later column, with the label and tooltip at its end."""

    source: Box
    target: Box
    kind: str
    label: tuple[str, ...]  # lines of text
    height: float  # of its slot
    title: str

    @property
    def port(self) -> tuple[str, str]:
        """Wires with the same port leave their box together."""
        return self.source.key, self.kind

    @property
    def is_long(self) -> bool:
        """Whether it passes a column."""
        return self.target.column > self.source.column + 1


@dataclasses.dataclass(frozen=True)
class WireLane:
    """The part above all boxes of the long wires of a port."""

    y: float
    first: int  # columns
    last: int


@dataclasses.dataclass(frozen=True)
class PlacedPlan:
    """Heights: tops of boxes, ports, bottoms of wires' slots, lanes, and outlines' edges."""

    tops: Mapping[str, float]
    ports: Mapping[tuple[str, str], float]
    slots: Mapping[Wire, float]
    lanes: Mapping[tuple[str, str], WireLane]
    outlines: Mapping[str, tuple[float, float]]  # title -> (top, bottom)


def place(boxes: Sequence[Box], wires: Sequence[Wire]) -> PlacedPlan:
    """Places boxes and wires; boxes of a column stand in the order in which they are listed."""
    tops, outlines = _stacked(boxes)
    return PlacedPlan(tops, _ports(wires, tops), _slots(wires, tops), _lanes(wires), outlines)


def _stacked(boxes: Sequence[Box]) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """(tops of boxes, edges of outlines): each group below all that its columns have so far."""
    groups: dict[tuple[str, str], list[Box]] = {}
    for box in boxes:
        groups.setdefault((box.outline, "" if box.outline else box.key), []).append(box)
    free: dict[int, float] = collections.defaultdict(float)  # from here on, by column
    tops: dict[str, float] = {}
    outlines: dict[str, tuple[float, float]] = {}
    for (title, _), members in groups.items():
        columns: dict[int, list[Box]] = {}
        for box in members:
            columns.setdefault(box.column, []).append(box)
        covered = range(min(columns), max(columns) + 1)
        above, below = (OUTLINE_PAD + OUTLINE_TITLE, OUTLINE_PAD) if title else (0.0, 0.0)
        top = max(free[column] for column in covered) + above
        bottom = top + max(map(_height, columns.values()))
        for stacked in columns.values():
            y = (top + bottom - _height(stacked)) / 2
            for box in stacked:
                tops[box.key] = y
                y += box.height + BOX_GAP
        free.update(dict.fromkeys(covered, bottom + below + BOX_GAP))
        if title:
            outlines[title] = (top - above, bottom + below)
    return tops, outlines


def _height(stacked: Sequence[Box]) -> float:
    return sum(box.height for box in stacked) + BOX_GAP * (len(stacked) - 1)


def _ports(wires: Sequence[Wire], tops: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Where wires leave their boxes: the kinds of a box at equal distances."""
    kinds: dict[Box, list[str]] = {}
    for wire in sorted(wires, key=lambda wire: (not wire.is_long, tops[wire.target.key])):
        if wire.kind not in kinds.setdefault(wire.source, []):
            kinds[wire.source].append(wire.kind)
    return {
        (box.key, kind): tops[box.key] + box.height * number / (len(found) + 1)
        for box, found in kinds.items()
        for number, kind in enumerate(found, 1)
    }


def _slots(wires: Sequence[Wire], tops: Mapping[str, float]) -> dict[Wire, float]:
    """Where wires end: one below the other in the middle of their box, those of lanes first."""
    ends: dict[Box, list[Wire]] = {}
    for wire in sorted(wires, key=lambda wire: (not wire.is_long, tops[wire.source.key])):
        ends.setdefault(wire.target, []).append(wire)
    slots = {}
    for box, found in ends.items():
        y = tops[box.key] + (box.height - sum(wire.height for wire in found)) / 2
        for wire in found:
            y += wire.height
            slots[wire] = y
    return slots


def _lanes(wires: Sequence[Wire]) -> dict[tuple[str, str], WireLane]:
    """A lane for each port of long wires; one may follow another at the same height."""
    last: dict[tuple[str, str], int] = {}
    first: dict[tuple[str, str], int] = {}
    for wire in wires:
        if wire.is_long:
            first[wire.port] = wire.source.column + 1
            last[wire.port] = max(last.get(wire.port, 0), wire.target.column - 1)
    lanes: dict[tuple[str, str], WireLane] = {}
    taken: dict[int, int] = {}  # level -> its last column
    for port in sorted(first, key=lambda port: (first[port], last[port], port)):
        level = next((n for n, end in taken.items() if end < first[port]), len(taken))
        taken[level] = last[port]
        lanes[port] = WireLane(-BOX_GAP - LANE_GAP * level, first[port], last[port])
    return lanes
