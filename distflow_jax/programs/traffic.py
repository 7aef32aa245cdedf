"""What a compiled program sends between devices, by kind and mesh axes."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distflow_jax.programs.hlo import Collective
from distflow_jax.programs.replica_groups import axes_of, read_groups

UNKNOWN = ("?",)  # for axes: groups in a form that could not be read


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same groups of devices, loops multiplied.

    `bytes` on each device, of what an all-gather gives, of what all others take.
    """

    kind: str  # of hlo.COLLECTIVES
    axes: tuple[str, ...]  # of the mesh; UNKNOWN where the groups could not be read
    overlapped: bool  # asynchronous: other work goes on meanwhile
    bytes: float
    times: int
    # devices, int [groups, devices of one]; of a permutation [pairs, 2]
    groups: np.ndarray = dataclasses.field(repr=False, compare=False)

    def repeated(self, times: int) -> "Traffic":
        """That of a program that runs so many times."""
        return dataclasses.replace(self, bytes=times * self.bytes, times=times * self.times)


def traffic_of(
    collectives: Iterable[Collective], mesh: Mapping[str, int], numbers: np.ndarray | None = None
) -> list[Traffic]:
    """Collectives of a program that was compiled for a mesh (axis -> size), the largest first.

    `numbers`, by which groups then go, are those of the mesh's devices, in its order; None: 0, 1,
    ... Collectives that leave everything where it is are left out.
    """
    devices = int(np.prod(list(mesh.values())))
    sums: dict[tuple[str, bool, str], tuple[float, int]] = {}
    for one in collectives:
        key = (one.kind, one.overlapped, one.groups)
        size, times = sums.get(key, (0.0, 0))
        sums[key] = (size + one.bytes * one.times, times + one.times)
    found = []
    for (kind, overlapped, text), (size, times) in sums.items():
        groups = read_groups(text, devices)
        if groups is not None and groups.max() >= devices:
            groups = None
        axes = UNKNOWN if groups is None else axes_of(groups, mesh)
        if axes:
            groups = np.arange(devices)[None] if groups is None else groups
            groups = groups if numbers is None else numbers[groups]
            found.append(Traffic(kind, axes, overlapped, size, times, groups))
    return sorted(found, key=lambda t: -t.bytes)


def bytes_by_axes(traffic: Iterable[Traffic]) -> dict[str, dict[str, float]]:
    """{"fsdp": {"all-gather": bytes}}, axes of one group joined by "*"."""
    found: dict[str, dict[str, float]] = {}
    for one in traffic:
        kinds = found.setdefault("*".join(one.axes), {})
        kinds[one.kind] = kinds.get(one.kind, 0.0) + one.bytes
    return found


def merged(traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Traffic of several programs, one for each kind and groups of devices, the largest first."""
    found: dict[tuple[Any, ...], Traffic] = {}
    for one in traffic:
        key = (one.kind, one.axes, one.overlapped, one.groups.shape, one.groups.tobytes())
        if key in found:
            size, times = found[key].bytes + one.bytes, found[key].times + one.times
            one = dataclasses.replace(one, bytes=size, times=times)
        found[key] = one
    return tuple(sorted(found.values(), key=lambda one: -one.bytes))
