"""Meshes of all roles, every one a reshape of one canonical device order, or of a part of it.

XLA reshards between two meshes only if they list the devices in the same order, so no role may
build a mesh of its own from `jax.devices()`. A submesh is the same slice of every host's devices,
so that every process has devices in every mesh, and none is left out of a computation.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from distflow_jax.layout import Layout, axes_text, submesh_text

Submesh = tuple[int, int]  # first and last + 1 of a host's devices
# axes of a training mesh, the outermost first, and the least size that a config may give
_LEAST = {"data": 1, "fsdp": 0, "expert": 1, "pipeline": 1, "context": 1, "tensor": 1}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Meshes of the roles, over all devices or a part of every host's. Sizes are global.

    data * fsdp * expert * pipeline * context * tensor must equal the number of devices; fsdp = 0
    takes what the others leave. Roles whose parts are disjoint work side by side.
    """

    # copies of parameters and optimizer state, each divided over fsdp; rows are divided over data x
    # fsdp x expert. Copies exchange gradients only, where fsdp also gathers the parameters of every
    # layer
    data: int = 1
    fsdp: int = 0  # devices that share parameters, optimizer state and rows; 0: all that are left
    # devices that share the experts of a mixture, to which their tokens go; each has rows of its
    # own, and copies of all other parameters
    expert: int = 1
    # devices that share the layers: each has a part of them, and rows go from one to the next
    pipeline: int = 1
    context: int = 1  # devices that share each row, for long ones: each has a part of its tokens
    tensor: int = 1  # devices that share each matrix product
    # devices that share one copy of the sampler's weights: those of a host, or of several hosts
    rollout_tensor: int = 1
    # of every host, the devices that train and predict: "0:4" are the first four; "": all. Samplers
    # have all devices
    devices: str = ""
    # where a training role or a model differs: {"CRITIC": {"devices": "6:8", "tensor": 2}}
    roles: Mapping[str, Mapping[str, int | str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, low in (*_LEAST.items(), ("rollout_tensor", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"mesh.{name} must be at least {low}, got {getattr(self, name)}")
        parse_submesh("mesh.devices", self.devices)
        for role, sizes in self.roles.items():
            if isinstance(sizes, Mapping) and "stage" in sizes:
                raise ValueError(f"mesh.roles.{role}.stage is now called pipeline: write that")
            if not isinstance(sizes, Mapping) or set(sizes) - {*_LEAST, "devices"}:
                raise ValueError(
                    f"mesh.roles.{role} must have the keys {', '.join(_LEAST)} and devices at "
                    f"most, got {sizes!r}"
                )
            parse_submesh(f"mesh.roles.{role}.devices", sizes.get("devices", ""))
            for name, low in _LEAST.items():
                value = sizes.get(name, low)
                if not isinstance(value, int) or isinstance(value, bool) or value < low:
                    raise ValueError(
                        f"mesh.roles.{role}.{name} must be a whole number of at least {low}, got "
                        f"{value!r}"
                    )


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Axes of a training role's mesh, checked against the devices."""

    fsdp: int
    tensor: int
    submesh: Submesh | None = None  # of every host's devices; None: all
    data: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """Data ranks: groups of devices that hold different rows."""
        return self.data * self.fsdp * self.expert

    @property
    def row_chunks(self) -> int:
        """Into how many pieces rows are cut (context.py); 1 where they stay whole."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def layout(self) -> Layout:
        """The planner's view of it. Of the axes fsdp and tensor are always named."""
        sizes = ((name, getattr(self, name)) for name in _LEAST)
        named = ((n, size) for n, size in sizes if size > 1 or n in ("fsdp", "tensor"))
        return Layout("mesh", tuple(named), self.submesh)

    def describe(self) -> tuple[str, str]:
        """(sizes, devices) for people; no devices are named where it has all."""
        where = (
            "" if self.submesh is None else f"on devices {submesh_text(self.submesh)} of every host"
        )
        return axes_text(self.layout), where


def parse_submesh(where: str, text: str | int) -> Submesh | None:
    """ "4:6" -> (4, 6), "" -> None. ValueError names `where`, the config key."""
    if text == "":
        return None
    found = re.fullmatch(r"(\d+):(\d+)", str(text))
    if not found:
        raise ValueError(
            f"{where} must be FIRST:LAST, as in a slice of a host's devices ('4:6' are the fifth "
            f"and the sixth), got {text!r}"
        )
    first, last = int(found[1]), int(found[2])
    if first >= last:
        raise ValueError(f"{where}={text!r} holds no device: use '{first}:{first + 1}' for one")
    return first, last


def resolve_submesh(where: str, text: str, local_devices: int) -> Submesh | None:
    """parse_submesh, checked against the devices of a host; all of them are no part."""
    submesh = parse_submesh(where, text)
    if submesh is not None and submesh[1] > local_devices:
        raise ValueError(
            f"{where}={text!r} asks for devices that a host of {local_devices} does not have; end "
            f"at {local_devices} or before"
        )
    return None if submesh == (0, local_devices) else submesh


def canonical_order(devices: Iterable[jax.Device]) -> list[jax.Device]:
    """Devices by process and then by id."""
    return sorted(devices, key=lambda d: (d.process_index, d.id))


def canonical_devices(
    submesh: Submesh | None = None, devices: Iterable[jax.Device] | None = None
) -> np.ndarray:
    """All devices, or a part of every process's, in the canonical order. [devices].

    `devices` are those of a pod that is planned for; None: the job's.
    """
    devices = canonical_order(jax.devices() if devices is None else devices)
    if submesh is not None:
        hosts = itertools.groupby(devices, key=lambda d: d.process_index)
        devices = [d for _, of_host in hosts for d in list(of_host)[slice(*submesh)]]
    return np.array(devices, dtype=object)


def resolve_sizes(
    sizes: Mapping[str, int], devices: int, *, where: str = "mesh", submesh: Submesh | None = None
) -> MeshSizes:
    """Fills in fsdp = 0 and checks that the axes cover the devices.

    `sizes` by axis, those left out are 1 (fsdp: 0). `where` is the config section that holds them,
    `devices` the number of those in `submesh`. Raises ValueError with the fix.
    """
    found = {name: sizes.get(name, low) for name, low in _LEAST.items()}
    shown = " x ".join(
        f"{where}.{name}={size or 'auto'}"
        for name, size in found.items()
        if size != 1 or name in ("fsdp", "tensor")
    )
    problem = f"{shown} does not cover {devices} devices"
    left = devices
    for name in reversed(_LEAST):
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
    """ValueError unless groups of `width` devices are whole parts of hosts, or whole hosts."""
    if local_devices % width == 0:
        return
    if width % local_devices == 0 and processes % (width // local_devices) == 0:
        return
    fits = [d for d in range(1, local_devices + 1) if local_devices % d == 0]
    fits += [n * local_devices for n in range(2, processes + 1) if processes % n == 0]
    raise ValueError(
        f"{what}={width} is neither a part of the {local_devices} devices of a host nor a number "
        f"of whole hosts that divides the {processes} there are; use one of {fits}"
    )


def hosts_per_sampler(rollout_tensor: int, local_devices: int) -> int:
    """Processes that sample together, each with a part of the same weights."""
    return max(1, rollout_tensor // local_devices)


def ranks_of_process(ranks: int, processes: int, process: int) -> range:
    """The data ranks that lie, wholly or in part, on a process's devices."""
    if ranks >= processes:
        return range(process * ranks // processes, (process + 1) * ranks // processes)
    return range(process * ranks // processes, process * ranks // processes + 1)


def processes_of_rank(ranks: int, processes: int, rank: int) -> range:
    """The processes whose devices hold a data rank: the inverse of ranks_of_process."""
    if ranks >= processes:
        return range(rank * processes // ranks, rank * processes // ranks + 1)
    return range(rank * processes // ranks, (rank + 1) * processes // ranks)


def role_mesh(sizes: MeshSizes, devices: Iterable[jax.Device] | None = None) -> Mesh:
    """The axes of its layout over a role's devices, those of a data rank next to each other.

    Axes are Auto: XLA propagates shardings. `devices`: see canonical_devices.
    """
    names, shape = zip(*sizes.layout.axes, strict=True)
    return Mesh(canonical_devices(sizes.submesh, devices).reshape(shape), names)


def replica_mesh(rollout_tensor: int, devices: Iterable[jax.Device] | None = None) -> Mesh:
    """(replica, tensor) over all devices: the layout in which weights go to the samplers."""
    all_devices = canonical_devices(devices=devices)
    return Mesh(all_devices.reshape(-1, rollout_tensor), ("replica", "tensor"))


def sampler_mesh(rollout_tensor: int, devices: Iterable[jax.Device] | None = None) -> Mesh:
    """(data, tensor) over the devices of this process's sampler: what decodes needing nobody else.

    These are the process's own devices, or those of the hosts that share a copy of the weights.
    Of a pod that is planned for they are the first process's.
    """
    all_devices = canonical_devices(devices=devices)
    process = jax.process_index() if devices is None else all_devices[0].process_index
    local = sum(d.process_index == process for d in all_devices)
    hosts = hosts_per_sampler(rollout_tensor, local)
    ours = [d for d in all_devices if d.process_index // hosts == process // hosts]
    return Mesh(np.array(ours, dtype=object).reshape(-1, rollout_tensor), ("data", "tensor"))
