"""Meshes of the training roles, checked against the model and the machine."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from distflow_jax.config.mesh_config import MeshConfig
from distflow_jax.layout import Submesh, submesh_text
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.parallel.mesh import MeshSizes, check_hosts, resolve_sizes, resolve_submesh
from distflow_jax.planning.machine import Machine

SAMPLERS = "ROLLOUT"  # the key of mesh.roles for the samplers' devices


def mesh_sizes(
    config: MeshConfig, model: DecoderConfig, machine: Machine
) -> tuple[MeshSizes, dict[str, MeshSizes], Submesh | None]:
    """Meshes of the training roles, and the devices of samplers: (the common mesh, those of
    `mesh.roles` by name, see _sampler_submesh).

    Raises ValueError if a mesh does not fit the machine or the model, with sizes that do.
    """
    asked = {"mesh": dataclasses.asdict(config)} | {
        f"mesh.roles.{name}": {"devices": config.devices} | sizes
        for name, sizes in config.roles.items()
        if name != SAMPLERS
    }
    found = {where: _role_sizes(where, sizes, model, machine) for where, sizes in asked.items()}
    common = found.pop("mesh")
    roles = {where.removeprefix("mesh.roles."): sizes for where, sizes in found.items()}
    if "REWARD" in roles:
        raise ValueError(
            "mesh.roles.REWARD has no training mesh: rewards are computed on the host; remove it"
        )
    return common, roles, _sampler_submesh(config, (common, *roles.values()), machine)


def _sampler_submesh(
    config: MeshConfig, meshes: Sequence[MeshSizes], machine: Machine
) -> Submesh | None:
    """The devices of every host that samplers have, by mesh.roles.ROLLOUT; None: all of them.

    Raises ValueError for keys other than devices, and for devices that `meshes`, those of the
    training roles, share only in part.
    """
    sizes = config.roles.get(SAMPLERS)
    if sizes is None:
        return None
    where = f"mesh.roles.{SAMPLERS}"
    if others := sorted(set(sizes) - {"devices"}):
        raise ValueError(
            f"{where} accepts only devices, got {', '.join(others)}: set a sampler's width with "
            "mesh.rollout_tensor"
        )
    submesh = resolve_submesh(f"{where}.devices", sizes.get("devices", ""), machine.local_devices)
    whole = (0, machine.local_devices)
    first, last = submesh or whole
    trained = {(m.submesh or whole) for m in meshes}
    if all(b <= first or last <= a for a, b in trained):
        return submesh
    if trained == {(first, last)}:
        return submesh
    shown = ", ".join(f"'{submesh_text(part)}'" for part in sorted(trained))
    raise ValueError(
        f"{where}.devices='{first}:{last}' overlaps with the trainers' devices "
        f"({shown} in mesh.devices and other mesh.roles): give samplers exactly these or none"
    )


def _role_sizes(
    where: str, sizes: Mapping[str, int | str], model: DecoderConfig, machine: Machine
) -> MeshSizes:
    submesh = resolve_submesh(f"{where}.devices", sizes["devices"], machine.local_devices)
    if submesh is not None:
        machine = machine.submesh(submesh[1] - submesh[0])
    tensor = sizes.get("tensor", 1)
    check_width(f"{where}.tensor", tensor, model, machine.devices)
    check_hosts(tensor, f"{where}.tensor", machine.processes, machine.local_devices)
    sizes = resolve_sizes(sizes, machine.devices, where=where, submesh=submesh)
    if model.num_layers % sizes.pipeline:
        common = math.gcd(model.num_layers, machine.devices)
        fits = [n for n in range(1, common + 1) if common % n == 0]
        raise ValueError(
            f"{where}.pipeline={sizes.pipeline} does not divide the model's num_layers="
            f"{model.num_layers}; use one of {fits}"
        )
    if sizes.expert > 1 and not model.num_experts:
        raise ValueError(
            f"{where}.expert={sizes.expert} is for a mixture of experts, but this model has none; "
            "use 1, and fsdp or data for the other devices"
        )
    if model.num_experts % sizes.expert:
        common = math.gcd(model.num_experts, machine.devices)
        fits = [n for n in range(1, common + 1) if common % n == 0]
        near = min(fits, key=lambda n: abs(n - sizes.expert))
        raise ValueError(
            f"{where}.expert={sizes.expert} does not divide the model's {model.num_experts} "
            f"experts; use {near} (or any of {fits})"
        )
    if model.hidden_size % sizes.fsdp:
        fits = [n for n in range(1, sizes.fsdp + 1) if model.hidden_size % n == 0]
        raise ValueError(
            f"{where}.fsdp={sizes.fsdp} does not divide the model's hidden_size="
            f"{model.hidden_size}; use one of {fits}, and {where}.data for the other devices"
        )
    together = sizes.fsdp * sizes.pipeline
    if model.hidden_size % together:
        fits = [n for n in range(1, together + 1) if model.hidden_size % n == 0]
        raise ValueError(
            f"{where}.fsdp x {where}.pipeline={together} does not divide the model's hidden_size="
            f"{model.hidden_size}, as sharding the embedding requires; use a product of {fits}, "
            f"and {where}.data for the other devices"
        )
    shared = {name: getattr(sizes, name) for name in ("pipeline", "context", "tensor")}
    names = [name for name, size in shared.items() if size > 1]
    if names and names != ["tensor"]:  # the width of a tensor group alone was checked above
        what = " x ".join(f"{where}.{name}" for name in names)
        width = math.prod(shared.values())
        check_hosts(width, what, machine.processes, machine.local_devices)
    return sizes


def check_width(what: str, width: int, model: DecoderConfig, devices: int) -> None:
    """Raises ValueError unless groups of `width` of the devices divide heads, MLP and vocabulary of
    the model. `what`: the config key, for the message."""
    sizes = {name: getattr(model, name) for name in ("num_heads", "mlp_size", "vocab_size")}
    for name, size in sizes.items():
        if size % width:
            fits = [
                n
                for n in range(1, devices + 1)
                if not any(s % n for s in (devices, *sizes.values()))
            ]
            raise ValueError(
                f"{what}={width} does not divide the model's {name}={size}; use one of {fits}"
            )
