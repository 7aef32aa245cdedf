"""Meshes of all roles, each a reshape of one canonical device order, or of a submesh of it.

XLA reshards between two meshes only if they list the devices in the same order, so no role may
build its mesh from `jax.devices()` directly. A submesh is the same slice of every host's devices,
so that every process has devices in every mesh and takes part in every computation.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from distflow_jax.layout import AXES, Layout, Submesh, axes_text, parse_submesh, submesh_text


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Axes of the mesh of a training role, checked against the devices."""

    fsdp: int
    tensor: int
    submesh: Submesh | None = None  # of every host's devices; None: all
    data: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """Number of data ranks: groups of devices that hold different rows."""
        return self.data * self.fsdp * self.expert

    @property
    def row_chunks(self) -> int:
        """Chunks per row (context_parallel.py); 1 where rows are not divided."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def layout(self) -> Layout:
        """The mesh as a Layout. The axes fsdp and tensor are always named, others if above 1."""
        sizes = ((name, getattr(self, name)) for name in AXES)
        named = ((n, size) for n, size in sizes if size > 1 or n in ("fsdp", "tensor"))
        return Layout("mesh", tuple(named), self.submesh)

    def describe(self) -> tuple[str, str]:
        """(sizes, devices) as text; devices is "" for all devices."""
        where = (
            "" if self.submesh is None else f"on devices {submesh_text(self.submesh)} of every host"
        )
        return axes_text(self.layout), where


def resolve_submesh(where: str, text: str, local_devices: int) -> Submesh | None:
    """parse_submesh, checked against the devices of a host; None if it has all of them."""
    submesh = parse_submesh(where, text)
    if submesh is not None and submesh[1] > local_devices:
        raise ValueError(
            f"{where}={text!r} goes beyond the {local_devices} devices of a host; end at "
            f"{local_devices} or before"
        )
    return None if submesh == (0, local_devices) else submesh


def canonical_order(devices: Iterable[jax.Device]) -> list[jax.Device]:
    """Devices sorted by process, then by id."""
    return sorted(devices, key=lambda d: (d.process_index, d.id))


def canonical_devices(
    submesh: Submesh | None = None, devices: Iterable[jax.Device] | None = None
) -> np.ndarray:
    """All devices, or those of a submesh, in the canonical order; an object array [devices].

    `devices`: of a pod that is planned for; None: the job's.
    """
    devices = canonical_order(jax.devices() if devices is None else devices)
    if submesh is not None:
        hosts = itertools.groupby(devices, key=lambda d: d.process_index)
        devices = [d for _, of_host in hosts for d in list(of_host)[slice(*submesh)]]
    return np.array(devices, dtype=object)


def resolve_sizes(
    sizes: Mapping[str, int], devices: int, *, where: str = "mesh", submesh: Submesh | None = None
) -> MeshSizes:
    """Replaces fsdp = 0 by the remaining devices, and checks that the axes cover all devices.

    `sizes` by axis; axes left out have size 1 (fsdp: 0). `where`: the config section of the sizes.
    `devices`: the number of devices in `submesh`. Raises ValueError with the fix.
    """
    found = {name: sizes.get(name, low) for name, low in AXES.items()}
    shown = " x ".join(
        f"{where}.{name}={size or 'auto'}"
        for name, size in found.items()
        if size != 1 or name in ("fsdp", "tensor")
    )
    problem = f"{shown} does not cover {devices} devices"
    left = devices
    for name in reversed(AXES):
        if name == "fsdp":
            continue
        if left % found[name]:
            fits = [n for n in range(1, left + 1) if left % n == 0]
            raise ValueError(f"{problem}; {name} must be one of {fits}, and fsdp what is left")
        left //= found[name]
    if found["fsdp"] not in (0, left):
        raise ValueError(f"{problem}; fsdp must be {left}, what the others leave, or 0 for that")
    return MeshSizes(**found | {"fsdp": left}, submesh=submesh)


def check_hosts(width: int, what: str, processes: int, local_devices: int) -> None:
    """Raises ValueError unless groups of `width` devices evenly divide a host, or are whole hosts.

    `what`: the config key, for the message.
    """
    if local_devices % width == 0:
        return
    if width % local_devices == 0 and processes % (width // local_devices) == 0:
        return
    fits = [d for d in range(1, local_devices + 1) if local_devices % d == 0]
    fits += [n * local_devices for n in range(2, processes + 1) if processes % n == 0]
    raise ValueError(
        f"{what}={width} neither divides the {local_devices} devices of a host nor is a number of "
        f"whole hosts that divides all {processes}; use one of {fits}"
    )


def hosts_per_sampler(rollout_tensor: int, local_devices: int) -> int:
    """Number of processes that share a sampler, each with a shard of the same weights."""
    return max(1, rollout_tensor // local_devices)


def ranks_of_process(ranks: int, processes: int, process: int) -> range:
    """The data ranks that a process's devices hold, wholly or in part."""
    if ranks >= processes:
        return range(process * ranks // processes, (process + 1) * ranks // processes)
    return range(process * ranks // processes, process * ranks // processes + 1)


def processes_of_rank(ranks: int, processes: int, rank: int) -> range:
    """The processes whose devices hold a data rank: the inverse of ranks_of_process."""
    if ranks >= processes:
        return range(rank * processes // ranks, rank * processes // ranks + 1)
    return range(rank * processes // ranks, (rank + 1) * processes // ranks)


def role_mesh(sizes: MeshSizes, devices: Iterable[jax.Device] | None = None) -> Mesh:
    """The mesh of a role; the devices of a data rank are neighbours.

    Axes are Auto: XLA propagates shardings. `devices`: see canonical_devices.
    """
    names, shape = zip(*sizes.layout.axes, strict=True)
    return Mesh(canonical_devices(sizes.submesh, devices).reshape(shape), names)


def replica_mesh(
    rollout_tensor: int,
    devices: Iterable[jax.Device] | None = None,
    submesh: Submesh | None = None,
) -> Mesh:
    """The mesh (replica, tensor) over all devices of samplers, as they hold their weights."""
    all_devices = canonical_devices(submesh, devices)
    return Mesh(all_devices.reshape(-1, rollout_tensor), ("replica", "tensor"))


def sampler_mesh(
    rollout_tensor: int,
    devices: Iterable[jax.Device] | None = None,
    submesh: Submesh | None = None,
) -> Mesh:
    """The mesh (data, tensor) of this process's sampler, which decodes independently of others.

    Its devices are the process's own, or those of the hosts that share a copy of the weights; of
    each host those of `submesh`. For a pod that is planned for, they are those of the first
    process.
    """
    all_devices = canonical_devices(submesh, devices)
    process = jax.process_index() if devices is None else all_devices[0].process_index
    local = sum(d.process_index == process for d in all_devices)
    hosts = hosts_per_sampler(rollout_tensor, local)
    ours = [d for d in all_devices if d.process_index // hosts == process // hosts]
    return Mesh(np.array(ours, dtype=object).reshape(-1, rollout_tensor), ("data", "tensor"))
