"""Pods by name: v5p-32 or v5p:8x8x16 through libtpu, which needs no TPU; GPUs as numbers only."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from distflow_jax.parallel.mesh import MeshSizes, canonical_order
from distflow_jax.planning.chips import CHIPS, Chip
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.machine_names import (
    GPUS_PER_NODE,
    NamedMachine,
    chip_named,
    fits_a_host,
    named_machine,
)
from distflow_jax.pods.efficiency import Efficiency, efficiency_of
from distflow_jax.pods.interconnect import Interconnect, Nodes, Torus

# without these libtpu looks for a TPU of this machine and its neighbours, and locks it
_ALONE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
}
REQUIREMENTS = "requirements-tpu-plan.txt"


@dataclasses.dataclass(frozen=True)
class TracedDevice:
    """Stand-in for a device in meshes on which programs are traced but not compiled."""

    id: int
    process_index: int
    platform: str
    device_kind: str


@dataclasses.dataclass(frozen=True)
class Pod:
    """Devices and their interconnect.

    `devices`, in the canonical order: those for which XLA compiles, or TracedDevices if there is no
    compiler for them here.
    """

    name: str
    chip: Chip
    hosts: int
    per_host: int
    interconnect: Interconnect
    devices: tuple[Any, ...] = dataclasses.field(repr=False)
    measured: Efficiency | None = dataclasses.field(default=None, repr=False)  # of its chips

    @property
    def efficiency(self) -> Efficiency:
        """Shares of its chips' peak rates that programs reach: measured, or else published."""
        return self.measured or efficiency_of(self.chip)

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.hosts * self.per_host

    @property
    def compiles(self) -> bool:
        """Whether programs can be compiled for the pod here; otherwise formulas give the costs."""
        return not isinstance(self.devices[0], TracedDevice)

    @property
    def machine(self) -> Machine:
        """The pod as a Machine."""
        return Machine(
            processes=self.hosts,
            devices=self.size,
            local_devices=self.per_host,
            platform=self.chip.platform,
            memory=self.chip.memory,
            chip=self.chip.name,
        )

    def numbers(self, mesh: jax.sharding.Mesh) -> np.ndarray:
        """Numbers of a mesh's devices in the canonical order, int [devices] in the mesh's order."""
        places = {device.id: number for number, device in enumerate(self.devices)}
        return np.array([places[device.id] for device in mesh.devices.flat])

    def slice_of(self, numbers: np.ndarray) -> "Pod":
        """A separate TPU slice as large as the box around the chips of these devices.

        `numbers`: int [devices], in the canonical order.
        """
        places = self.interconnect.places[numbers]
        sizes = places.max(0) - places.min(0) + 1
        return open_topology(f"{self.chip.name}:{'x'.join(map(str, sizes))}")

    def describe(self) -> str:
        """The pod in two lines of text."""
        c = self.chip
        links = f"{c.link_bandwidth / 1e9:.0f} GB/s "
        if c.dims:
            links += f"on each of {2 * c.dims} links"
        else:
            links += f"within a node, {c.network_bandwidth / 1e9:.0f} GB/s between nodes"
        halves = f"two per chip, {c.inner_bandwidth / 1e9:.0f} GB/s between them; "
        what, notes = ("devices", halves) if c.devices > 1 else ("chips", "")
        return (
            f"{self.name}: {self.size} {what} {c.name} in {self.hosts} hosts of {self.per_host}\n"
            f"a {what[:-1]}: {notes}{c.memory / 2**30:.4g} GiB of HBM at "
            f"{c.memory_bandwidth / 1e9:.0f} GB/s, "
            f"{c.flops / 1e12:.0f} TFLOP/s (bfloat16), one way {links} ({c.source})\n"
        )

    def holds(self, mesh: MeshSizes) -> bool:
        """Whether the devices along each axis of a mesh are a box of the pod's places."""
        names, shape = zip(*mesh.layout.axes, strict=True)
        if math.prod(shape) != self.size:
            return True  # a submesh
        return all(self._spans(names, shape, axis) for axis in names)

    def check_mesh(self, where: str, mesh: MeshSizes) -> None:
        """Raises ValueError, with sizes that fit, unless the pod holds this mesh."""
        if self.holds(mesh):
            return
        names, shape = zip(*mesh.layout.axes, strict=True)
        for axis in reversed(names):
            if self._spans(names, shape, axis):
                continue
            rest = {n: s for n, s in zip(names, shape, strict=True) if n != axis}
            fits = [n for n in range(1, self.size + 1) if self._fits(axis, n, rest)]
            raise ValueError(
                f"{where}.{axis}={dict(mesh.layout.axes)[axis]} is not a box of the chips of "
                f"{self.name}, with {rest}: use one of {fits}, and fsdp or data for the rest"
            )

    def _fits(self, axis: str, size: int, rest: dict[str, int]) -> bool:
        """Whether the axis could have that size if fsdp, or else data, takes the rest."""
        free = next((n for n in ("fsdp", "data") if n != axis), "")
        fixed = size * math.prod(s for n, s in rest.items() if n != free)
        if self.size % fixed:
            return False
        sizes = rest | {axis: size, free: self.size // fixed}
        names = [
            n for n in ("data", "fsdp", "expert", "pipeline", "context", "tensor") if n in sizes
        ]
        shape = tuple(sizes[n] for n in names)
        return all(self._spans(names, shape, name) for name in names)

    def _spans(self, names: Sequence[str], shape: Sequence[int], axis: str) -> bool:
        numbers = np.moveaxis(np.arange(self.size).reshape(shape), names.index(axis), -1)
        groups = numbers.reshape(-1, numbers.shape[-1])
        return all(map(self.interconnect.span, self.interconnect.unlike(groups)))


def open_topology(name: str) -> Pod:
    """Opens a pod by name.

    `name`: of a machine (v5litepod-8, v5p-32, h100-8; see machine_names.py), or CHIP:SIZES with the
    sizes of a TPU's torus (v5p:4x4x8), or nodes x GPUs (h100:64x8). Call it before JAX initialises
    its devices: afterwards this process has CPUs only. Raises ValueError for a name that is
    unknown, and FileNotFoundError if libtpu is missing.
    """
    kind, colon, size = name.partition(":")
    chip = chip_named(kind)
    if not colon and "-" in name:
        try:
            found = named_machine(name)
        except ValueError as error:
            raise ValueError(f"--topology={name}: {error}") from None
        return _nodes(name, found) if not found.chip.dims else _slice(name, found)
    if chip is None:
        raise ValueError(
            f"--topology={name}: use a machine name, such as v5litepod-8, v5p-32 or h100-8, "
            "or sizes: of a TPU's torus (v5p:4x4x8, v5e:16x16), or nodes x GPUs (h100:64x8); chips "
            f"are {', '.join(CHIPS)}"
        )
    sizes = tuple(int(n) for n in size.split("x")) if re.fullmatch(r"\d+(x\d+)*", size) else ()
    found = NamedMachine(chip, sizes)
    return _nodes(name, found) if not chip.dims else _slice(name, found)


def present_pod(chip: Chip) -> Pod:
    """This job's own devices as nodes of such chips; programs are compiled for them."""
    devices, per_host = canonical_order(jax.devices()), jax.local_device_count()
    hosts = len(devices) // per_host
    return Pod("here", chip, hosts, per_host, Nodes(chip, hosts, per_host), tuple(devices))


def _nodes(name: str, machine: NamedMachine) -> Pod:
    chip, sizes = machine.chip, machine.sizes
    if len(sizes) != 2 or not 1 <= sizes[1] <= GPUS_PER_NODE or sizes[0] < 1:
        raise ValueError(
            f"--topology={name}: write nodes x GPUs, with 1 to {GPUS_PER_NODE} GPUs per node: "
            f"{chip.name}:64x8 has 512"
        )
    if sizes[0] > 1 and not chip.network_bandwidth:
        raise ValueError(
            f"--topology={name}: the network between nodes of {chip.name} is not known; plan for "
            f"one node: {chip.name}:1x{sizes[1]}"
        )
    devices = (
        TracedDevice(number, number // sizes[1], chip.platform, chip.name)
        for number in range(math.prod(sizes))
    )
    return Pod(name, chip, *sizes, Nodes(chip, *sizes), tuple(devices))


def _slice(name: str, machine: NamedMachine) -> Pod:
    chip, sizes = machine.chip, machine.sizes
    most = "x".join(map(str, chip.largest))
    if len(sizes) != chip.dims or 0 in sizes:
        raise ValueError(
            f"--topology={name}: give {chip.dims} sizes for a slice of {chip.name}, up to {most}: "
            f"{chip.name}:{'x'.join(['4'] * chip.dims)}"
        )
    if any(n > m for n, m in zip(sorted(sizes), chip.largest, strict=True)):
        raise ValueError(f"--topology={name}: a slice of {chip.name} has at most {most} chips")
    if importlib.util.find_spec("libtpu") is None:
        raise FileNotFoundError(
            f"--topology={name} needs libtpu to compile (no TPU is needed): pip install -r "
            f"{REQUIREMENTS}, or without a checkout: pip install 'distflow_jax[tpu]'"
        )
    for key, value in _ALONE.items():
        os.environ.setdefault(key, value)
    jax.config.update("jax_platforms", "cpu")
    options: dict[str, Any] = {}
    if fits_a_host(chip, sizes):  # otherwise libtpu's hosts have 2x2 chips
        options["chips_per_host_bounds"] = (*sizes, 1)[:3]
    if chip.counted > chip.devices:  # else libtpu makes a device of each core of a v4
        options["chip_config_name"] = "megacore"
    try:
        found = topologies.get_topology_desc(machine.topology, "tpu", **options).devices
    except Exception as error:  # the type depends on the version
        reason = str(error).partition("\n")[0]
        cubes = f", for {chip.name} multiples of 4" * (chip.dims == 3)
        raise ValueError(
            f"--topology={name}: libtpu has no such slice ({reason}); use powers of 2 up to "
            f"{most}{cubes}"
        ) from error
    devices = canonical_order(found)
    places = np.array([device.coords[: chip.dims] for device in devices])
    hosts = len({device.process_index for device in devices})
    torus = Torus(chip, sizes, places)
    return Pod(name, chip, hosts, len(devices) // hosts, torus, tuple(devices))
