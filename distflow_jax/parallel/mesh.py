"""Meshes of all roles, every one a reshape of one canonical device order.

XLA reshards between two meshes only if they list the devices in the same order, so no role may
build a mesh of its own from `jax.devices()`.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from distflow_jax.types import Layout


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Meshes of the roles, every one over all devices. Sizes are global.

    fsdp * tensor must equal the number of devices; fsdp = 0 takes what tensor leaves.
    """

    fsdp: int = 0  # ranks over which rows, parameters and optimizer state are divided; 0: all left
    tensor: int = 1  # devices that share each matrix product
    # devices that share one copy of the sampler's weights: those of a host, or of several hosts
    rollout_tensor: int = 1
    # where a training role or a model differs from the two above: {"REFERENCE": {"tensor": 2}}
    roles: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, low in (("fsdp", 0), ("tensor", 1), ("rollout_tensor", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"mesh.{name} must be at least {low}, got {getattr(self, name)}")
        for role, sizes in self.roles.items():
            if not isinstance(sizes, Mapping) or set(sizes) - {"fsdp", "tensor"}:
                raise ValueError(
                    f"mesh.roles.{role} must have the keys fsdp and tensor at most, got {sizes!r}"
                )
            for name, low in (("fsdp", 0), ("tensor", 1)):
                value = sizes.get(name, low)
                if not isinstance(value, int) or isinstance(value, bool) or value < low:
                    raise ValueError(
                        f"mesh.roles.{role}.{name} must be a whole number of at least {low}, got "
                        f"{value!r}"
                    )


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """(fsdp, tensor) of a training role, checked against the devices."""

    fsdp: int
    tensor: int

    @property
    def layout(self) -> Layout:
        """The planner's view of it."""
        return Layout("mesh", (("fsdp", self.fsdp), ("tensor", self.tensor)))


def canonical_devices() -> np.ndarray:
    """All devices of the job, ordered by process and then by id. Shape [devices]."""
    return np.array(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)), dtype=object)


def resolve_sizes(fsdp: int, tensor: int, devices: int, *, where: str = "mesh") -> MeshSizes:
    """Fills in fsdp = 0 and checks that the sizes cover the devices.

    `where` is the config section that holds them. Raises ValueError with the fix.
    """
    filled = fsdp or devices // tensor
    if filled * tensor != devices:
        fits = [d for d in range(1, devices + 1) if devices % d == 0]
        raise ValueError(
            f"{where}.fsdp={fsdp or 'auto'} x {where}.tensor={tensor} does not cover "
            f"{devices} devices; tensor must be one of {fits} and fsdp = {devices} / tensor"
        )
    return MeshSizes(filled, tensor)


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


def role_mesh(sizes: MeshSizes) -> Mesh:
    """(fsdp, tensor) over all devices. Axes are Auto: XLA propagates shardings."""
    return Mesh(canonical_devices().reshape(sizes.fsdp, sizes.tensor), ("fsdp", "tensor"))


def replica_mesh(rollout_tensor: int) -> Mesh:
    """(replica, tensor) over all devices: the layout in which weights go to the samplers."""
    return Mesh(canonical_devices().reshape(-1, rollout_tensor), ("replica", "tensor"))


def sampler_mesh(rollout_tensor: int) -> Mesh:
    """(data, tensor) over the devices of this process's sampler: what decodes needing nobody else.

    These are the process's own devices, or those of the hosts that share a copy of the weights.
    """
    hosts = hosts_per_sampler(rollout_tensor, jax.local_device_count())
    group = jax.process_index() // hosts
    ours = [d for d in canonical_devices() if d.process_index // hosts == group]
    return Mesh(np.array(ours, dtype=object).reshape(-1, rollout_tensor), ("data", "tensor"))
