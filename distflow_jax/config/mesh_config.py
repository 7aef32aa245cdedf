"""Settings of the meshes of all roles: the section `mesh` of a config."""

import dataclasses
from collections.abc import Mapping

from distflow_jax.layout import AXES, parse_submesh
from distflow_jax.parsing.checked_fields import COUNT, SIZE, at_least, check_fields
from distflow_jax.parsing.setting_checks import Section, setting


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section, name="mesh"):
    """Meshes of the roles, over all devices or a submesh. Sizes are global.

    data * fsdp * expert * pipeline * context * tensor must equal the number of devices; fsdp = 0
    takes the devices that the others leave. Roles on disjoint submeshes run concurrently.
    """

    # the chip for which these sizes were chosen, such as v5e or h100; on another chip, a run exits
    # before step 1. "": any chip
    chip: str = ""
    # data parallelism: number of replicas of parameters and optimizer state, each sharded over
    # fsdp; rows are sharded over data x fsdp x expert. Replicas exchange gradients only, whereas
    # fsdp also gathers the parameters of every layer
    data: int = setting(1, at_least(1))
    # devices over which parameters, optimizer state and rows are sharded; 0: all remaining devices
    fsdp: int = setting(0, at_least(0))
    # devices over which the experts of a mixture are sharded; tokens are sent to their experts.
    # Each device has its own rows, and copies of all other parameters
    expert: int = setting(1, at_least(1))
    # devices over which the layers are divided; micro-batches pass from one to the next
    pipeline: int = setting(1, at_least(1))
    # devices over which the tokens of each row are sharded, for long rows
    context: int = setting(1, at_least(1))
    tensor: int = setting(1, at_least(1))  # devices over which each matrix product is sharded
    # devices over which one copy of the sampler's weights is sharded, within a host or over several
    # whole hosts
    rollout_tensor: int = setting(1, at_least(1))
    # the devices of each host that run training and forward passes: "0:4" are the first four; "":
    # all. Samplers use all devices, or those in roles.ROLLOUT
    devices: str = ""
    # overrides for a training role or a model: {"CRITIC": {"devices": "6:8", "tensor": 2}}. For
    # samplers: {"ROLLOUT": {"devices": "6:8"}}, which are the trainers' devices or none of them
    roles: Mapping[str, Mapping[str, int | str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        parse_submesh("mesh.devices", self.devices)
        for role, sizes in self.roles.items():
            if isinstance(sizes, Mapping) and "stage" in sizes:
                raise ValueError(f"mesh.roles.{role}.stage was renamed to pipeline: use that name")
            if not isinstance(sizes, Mapping) or set(sizes) - {*AXES, "devices"}:
                raise ValueError(
                    f"mesh.roles.{role} may have the keys {', '.join(AXES)} and devices, "
                    f"got {sizes!r}"
                )
            parse_submesh(f"mesh.roles.{role}.devices", sizes.get("devices", ""))
            kinds = {name: COUNT if low else SIZE for name, low in AXES.items()}
            check_fields(sizes, kinds, f"mesh.roles.{role}")
