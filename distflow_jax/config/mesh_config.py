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

    # the chip that these sizes are for, such as v5e or h100; on another a run ends before step 1.
    # "": any
    chip: str = ""
    # copies of parameters and optimizer state, each divided over fsdp; rows are divided over data x
    # fsdp x expert. Copies exchange gradients only, whereas fsdp also gathers the parameters of
    # every layer
    data: int = setting(1, at_least(1))
    # devices that share parameters, optimizer state and rows; 0: all that are left
    fsdp: int = setting(0, at_least(0))
    # devices that divide the experts of a mixture; tokens are sent to their experts. Each device
    # has rows of its own, and copies of all other parameters
    expert: int = setting(1, at_least(1))
    # devices that divide the layers; micro-batches are passed from one to the next
    pipeline: int = setting(1, at_least(1))
    # devices that divide the tokens of each row, for long rows
    context: int = setting(1, at_least(1))
    tensor: int = setting(1, at_least(1))  # devices that divide each matrix product
    # devices that divide one copy of the sampler's weights: those of a host, or of several hosts
    rollout_tensor: int = setting(1, at_least(1))
    # the devices of every host that train and predict: "0:4" are the first four; "": all. Samplers
    # use all devices, or those of roles.ROLLOUT
    devices: str = ""
    # exceptions for a training role or a model: {"CRITIC": {"devices": "6:8", "tensor": 2}}; for
    # samplers {"ROLLOUT": {"devices": "6:8"}}, all trainers' devices or none of them
    roles: Mapping[str, Mapping[str, int | str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        parse_submesh("mesh.devices", self.devices)
        for role, sizes in self.roles.items():
            if isinstance(sizes, Mapping) and "stage" in sizes:
                raise ValueError(f"mesh.roles.{role}.stage is now called pipeline: write that")
            if not isinstance(sizes, Mapping) or set(sizes) - {*AXES, "devices"}:
                raise ValueError(
                    f"mesh.roles.{role} may have the keys {', '.join(AXES)} and devices, "
                    f"got {sizes!r}"
                )
            parse_submesh(f"mesh.roles.{role}.devices", sizes.get("devices", ""))
            kinds = {name: COUNT if low else SIZE for name, low in AXES.items()}
            check_fields(sizes, kinds, f"mesh.roles.{role}")
