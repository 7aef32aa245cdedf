"""Groups of devices that a collective joins, parsed from HLO.

Devices are numbered by their place in the mesh that the program was compiled for, the last axis
fastest. The mesh axes of a group therefore follow from the numbers alone.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

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
