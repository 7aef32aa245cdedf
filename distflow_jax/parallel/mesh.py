"""Meshes of all roles, every one a reshape of one canonical device order.

XLA reshards between two meshes only if they list the devices in the same order, so no role may
build a mesh of its own from `jax.devices()`.
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from distflow_jax.types import Layout


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Mesh of the training roles and of the sampler. Sizes are global.

    fsdp * tensor must equal the number of devices; fsdp = 0 takes what tensor leaves.
    """

    fsdp: int = 0  # ranks over which rows, parameters and optimizer state are divided; 0: all left
    tensor: int = 1  # ranks that share each matrix product
    rollout_tensor: int = 1  # devices of one host that share one copy of the sampler's weights

    def __post_init__(self):
        for name, low in (("fsdp", 0), ("tensor", 1), ("rollout_tensor", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"mesh.{name} must be at least {low}, got {getattr(self, name)}")


def canonical_devices() -> np.ndarray:
    """All devices of the job, ordered by process and then by id. Shape [devices]."""
    return np.array(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)), dtype=object)


def resolve_sizes(config: MeshConfig, devices: int, local_devices: int) -> MeshConfig:
    """Fills in fsdp and checks that the sizes cover the devices. Raises ValueError with the fix."""
    fsdp = config.fsdp or devices // config.tensor
    if fsdp * config.tensor != devices:
        fits = [d for d in range(1, devices + 1) if devices % d == 0]
        raise ValueError(
            f"mesh.fsdp={config.fsdp or 'auto'} x mesh.tensor={config.tensor} does not cover "
            f"{devices} devices; tensor must be one of {fits} and fsdp = {devices} / tensor"
        )
    if local_devices % config.rollout_tensor:
        fits = [d for d in range(1, local_devices + 1) if local_devices % d == 0]
        raise ValueError(
            f"mesh.rollout_tensor={config.rollout_tensor} does not divide the {local_devices} "
            f"devices of a host; use one of {fits}"
        )
    return dataclasses.replace(config, fsdp=fsdp)


def training_mesh(config: MeshConfig) -> Mesh:
    """(fsdp, tensor) over all devices. Axes are Auto: XLA propagates shardings."""
    return Mesh(canonical_devices().reshape(config.fsdp, config.tensor), ("fsdp", "tensor"))


def replica_mesh(config: MeshConfig) -> Mesh:
    """(replica, tensor) over all devices: the layout in which weights go to the samplers."""
    return Mesh(canonical_devices().reshape(-1, config.rollout_tensor), ("replica", "tensor"))


def sampler_mesh(config: MeshConfig) -> Mesh:
    """(data, tensor) over this process's own devices: where this host decodes, needing nobody."""
    mine = [d for d in canonical_devices() if d.process_index == jax.process_index()]
    return Mesh(np.array(mine, dtype=object).reshape(-1, config.rollout_tensor), ("data", "tensor"))


def mesh_layout(mesh: Mesh) -> Layout:
    """The planner's view of a mesh."""
    return Layout("mesh", tuple((str(name), int(size)) for name, size in mesh.shape.items()))
