"""Traffic of a compiled program between devices, by kind of collective and mesh axes.

Devices are numbered by their place in the mesh that the program was compiled for, the last axis
fastest, so the mesh axes of a group follow from the numbers that HLO gives.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from distflow_jax.programs.hlo import Collective
from distflow_jax.programs.overlap import Beside

UNKNOWN = ("?",)  # for axes: groups that could not be parsed


class Covered(NamedTuple):
    """An asynchronous collective, and what the compiled schedule puts beside it."""

    bytes: float  # each time, as of Collective
    times: float
    beside: Beside  # each time


@dataclasses.dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives of one kind over the same groups of devices; a loop counts once per trip."""

    kind: str  # of hlo.COLLECTIVES
    axes: tuple[str, ...]  # of the mesh; UNKNOWN if the groups could not be parsed
    overlapped: bool  # asynchronous: other work runs meanwhile
    bytes: float  # per device: of the results of all-gathers, of the operands of all others
    times: float
    # devices, int [groups, devices per group]; of a permutation [pairs, 2]
    groups: np.ndarray = dataclasses.field(repr=False, compare=False)
    # the asynchronous collectives one by one; (): not compiled, all of `bytes` may be hidden
    covered: tuple[Covered, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def repeated(self, times: float) -> "CollectiveTraffic":
        """The traffic of `times` runs of the program."""
        covered = tuple(c._replace(times=times * c.times) for c in self.covered)
        size, times = times * self.bytes, times * self.times
        return dataclasses.replace(self, bytes=size, times=times, covered=covered)


def traffic_of(
    collectives: Iterable[Collective], mesh: Mapping[str, int], numbers: np.ndarray | None = None
) -> list[CollectiveTraffic]:
    """Collectives of a program compiled for a mesh, summed by kind and groups, largest first.

    Args:
      collectives: those of the program.
      mesh: {axis: size}.
      numbers: of the mesh's devices in its order, int [devices], used in the groups of the result;
        None: 0, 1, ...

    Collectives that move no data between devices are left out.
    """
    devices = int(np.prod(list(mesh.values())))
    alike: dict[tuple[str, bool, str], list[Collective]] = {}
    for one in collectives:
        alike.setdefault((one.kind, one.overlapped, one.groups), []).append(one)
    found = []
    for (kind, overlapped, text), members in alike.items():
        groups = read_groups(text, devices)
        if groups is not None and groups.max() >= devices:
            groups = None
        axes = UNKNOWN if groups is None else axes_of(groups, mesh)
        if axes:
            groups = np.arange(devices)[None] if groups is None else groups
            groups = groups if numbers is None else numbers[groups]
            size, times = sum(c.bytes * c.times for c in members), sum(c.times for c in members)
            covered = (Covered(c.bytes, c.times, c.beside) for c in members if overlapped)
            whole = CollectiveTraffic(kind, axes, overlapped, size, times, groups, tuple(covered))
            found.append(whole)
    return sorted(found, key=lambda t: -t.bytes)


def bytes_by_axes(traffic: Iterable[CollectiveTraffic]) -> dict[str, dict[str, float]]:
    """{"fsdp": {"all-gather": bytes}}, with several axes joined by "*"."""
    found: dict[str, dict[str, float]] = {}
    for one in traffic:
        kinds = found.setdefault("*".join(one.axes), {})
        kinds[one.kind] = kinds.get(one.kind, 0.0) + one.bytes
    return found


def merged(traffic: Iterable[CollectiveTraffic]) -> tuple[CollectiveTraffic, ...]:
    """Traffic of several programs summed by kind and groups of devices, largest first."""
    found: dict[tuple[Any, ...], CollectiveTraffic] = {}
    for one in traffic:
        key = (one.kind, one.axes, one.overlapped, one.groups.shape, one.groups.tobytes())
        if key in found:
            size, times = found[key].bytes + one.bytes, found[key].times + one.times
            covered = found[key].covered + one.covered
            one = dataclasses.replace(one, bytes=size, times=times, covered=covered)
        found[key] = one
    return tuple(sorted(found.values(), key=lambda one: -one.bytes))


_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? ?\{([^}]*)\}$")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")  # reshaped and transposed, as in _IOTA
_MESH_AXIS = re.compile(r"'?(\w+)'?=(\d+)")
_SUB_AXIS = re.compile(r"'?(\w+)'?(?::\((\d+)\)(\d+))?$")  # name, or name:(sizes before)size
_LIST = re.compile(r"\{([\d,]*)\}")


def read_groups(text: str, devices: int) -> np.ndarray | None:
    """Groups of devices, int [groups, devices per group]; None if the form is unknown.

    `text` is one of {{0,1},{2,3}}, {} (all in one group), the iota form [2,2]<=[2,2]T(1,0)
    (numbers 0 to n - 1 reshaped, transposed, reshaped), mesh['a'=2,'b'=2] {'a'}, and the same with
    another order of the devices, device_ids=([2,2]T(1,0)) or (2,0,3,1) before the axes. The groups
    of a permutation are its pairs, [pairs, 2].
    """
    if text == "{}":
        return np.arange(devices)[None]
    if found := _IOTA.match(text):
        shape, reshaped, order = (_numbers(numbers or "") for numbers in found.groups())
        numbers = np.arange(math.prod(reshaped)).reshape(reshaped)
        return numbers.transpose(order or range(len(reshaped))).reshape(shape)
    if found := _MESH.match(text):
        places = _groups_of_mesh(found[1], found[3])
        order = None if found[2] is None else _ordered(found[2], devices)
        return places if order is None or places is None else order[places]
    groups = [_numbers(numbers) for numbers in _LIST.findall(text)]
    if not groups or len({len(group) for group in groups}) > 1:
        return None
    return np.array(groups)


def axes_of(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of `mesh` along which devices of a group differ, in the order of the mesh.

    `groups`: int [groups, devices per group]; `mesh`: {axis: size}. Empty if no data move: each
    group is a single device, or each pair a device and itself.
    """
    places = np.array(np.unravel_index(groups, tuple(mesh.values())))  # [axes, groups, devices]
    differ = (places != places[..., :1]).any(axis=(1, 2))
    return tuple(axis for axis, varies in zip(mesh, differ, strict=True) if varies)


def _groups_of_mesh(sizes: str, joined: str) -> np.ndarray | None:
    """Groups of a mesh along some of its axes or sub-axes."""
    mesh = {name: int(size) for name, size in _MESH_AXIS.findall(sizes)}
    wanted = [_SUB_AXIS.match(axis.strip()) for axis in joined.split(",") if axis.strip()]
    if not mesh or not all(axis and axis[1] in mesh for axis in wanted):
        return None
    shape: list[int] = []
    inside: list[int] = []  # dims that are within a group
    for name, size in mesh.items():
        cuts = {1, size}
        spans = [
            (int(p[2]), int(p[2]) * int(p[3])) if p[2] else (1, size)
            for p in wanted
            if p[1] == name
        ]
        cuts |= {cut for span in spans for cut in span}
        ordered = sorted(cuts)
        for low, high in zip(ordered, ordered[1:], strict=False):
            if any(first <= low and high <= last for first, last in spans):
                inside.append(len(shape))
            shape.append(high // low)
    if math.prod(shape) != math.prod(mesh.values()):
        return None
    outside = [d for d in range(len(shape)) if d not in inside]
    numbers = np.arange(math.prod(shape)).reshape(shape).transpose(*outside, *inside)
    return numbers.reshape(-1, math.prod(shape[d] for d in inside))


def _ordered(text: str, devices: int) -> np.ndarray:
    """The device at each place of a mesh with its own device order."""
    if found := _ORDER.match(text):
        shape, order = _numbers(found[1]), _numbers(found[2] or "")
        return np.arange(devices).reshape(shape).transpose(order or range(len(shape))).ravel()
    return np.array(_numbers(text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
