"""Traffic of a compiled program between devices, by kind of collective and mesh axes."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distflow_jax.programs.hlo import Collective
from distflow_jax.programs.replica_groups import axes_of, read_groups

UNKNOWN = ("?",)  # for axes: groups that could not be parsed


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same groups of devices; a loop counts once per trip."""

    kind: str  # of hlo.COLLECTIVES
    axes: tuple[str, ...]  # of the mesh; UNKNOWN if the groups could not be parsed
    overlapped: bool  # asynchronous: other work runs meanwhile
    bytes: float  # per device: of the results of all-gathers, of the operands of all others
    times: float
    # devices, int [groups, devices per group]; of a permutation [pairs, 2]
    groups: np.ndarray = dataclasses.field(repr=False, compare=False)

    def repeated(self, times: float) -> "Traffic":
        """The traffic of `times` runs of the program."""
        return dataclasses.replace(self, bytes=times * self.bytes, times=times * self.times)


def traffic_of(
    collectives: Iterable[Collective], mesh: Mapping[str, int], numbers: np.ndarray | None = None
) -> list[Traffic]:
    """Collectives of a program compiled for a mesh, summed by kind and groups, largest first.

    Args:
      collectives: those of the program.
      mesh: {axis: size}.
      numbers: of the mesh's devices in its order, int [devices], used in the groups of the result;
        None: 0, 1, ...

    Collectives that move no data between devices are left out.
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
    """{"fsdp": {"all-gather": bytes}}, with several axes joined by "*"."""
    found: dict[str, dict[str, float]] = {}
    for one in traffic:
        kinds = found.setdefault("*".join(one.axes), {})
        kinds[one.kind] = kinds.get(one.kind, 0.0) + one.bytes
    return found


def merged(traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Traffic of several programs summed by kind and groups of devices, largest first."""
    found: dict[tuple[Any, ...], Traffic] = {}
    for one in traffic:
        key = (one.kind, one.axes, one.overlapped, one.groups.shape, one.groups.tobytes())
        if key in found:
            size, times = found[key].bytes + one.bytes, found[key].times + one.times
            one = dataclasses.replace(one, bytes=size, times=times)
        found[key] = one
    return tuple(sorted(found.values(), key=lambda one: -one.bytes))
