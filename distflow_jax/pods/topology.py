"""Opens a pod by its name: v5p:8x8x16 through libtpu, which needs no TPU; gpu:64x8 as numbers. Or
the devices that are there."""

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
from distflow_jax.pods.interconnect import Interconnect, Nodes, Torus

# libtpu looks for the machine's own TPU and its neighbours, and locks it, unless told that there
# are none
_ALONE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
}
REQUIREMENTS = "requirements-tpu-plan.txt"
_GPU_NAMES = ("gpu", *(c.name for c in CHIPS.values() if c.platform == "gpu"))
_TPU_NAMES = tuple(c.name for c in CHIPS.values() if c.platform == "tpu")


@dataclasses.dataclass(frozen=True)
class TracedDevice:
    """Stands for a device in meshes that programs are traced on, and nothing is compiled for."""

    id: int
    process_index: int
    platform: str
    device_kind: str


@dataclasses.dataclass(frozen=True)
class Pod:
    """Chips and how they are joined. `devices` in the canonical order: what XLA compiles for, or
    TracedDevices where there is no compiler for them here."""

    name: str
    chip: Chip
    hosts: int
    per_host: int
    interconnect: Interconnect
    devices: tuple[Any, ...] = dataclasses.field(repr=False)

    @property
    def size(self) -> int:
        """Number of chips."""
        return self.hosts * self.per_host

    @property
    def compiles(self) -> bool:
        """Whether programs can be compiled for it here; else formulas tell what they cost."""
        return not isinstance(self.devices[0], TracedDevice)

    @property
    def machine(self) -> Machine:
        """What a run finds there."""
        return Machine(
            processes=self.hosts,
            devices=self.size,
            local_devices=self.per_host,
            platform=self.chip.platform,
            memory=self.chip.memory,
        )

    def numbers(self, mesh: jax.sharding.Mesh) -> np.ndarray:
        """Where the devices of a mesh are in the canonical order, in the mesh's. int [devices]."""
        places = {device.id: number for number, device in enumerate(self.devices)}
        return np.array([places[device.id] for device in mesh.devices.flat])

    def part(self, numbers: np.ndarray) -> "Pod":
        """A TPU slice as large as the box that these chips take, alone."""
        places = self.interconnect.places[numbers]
        sizes = places.max(0) - places.min(0) + 1
        return open_topology(f"{self.chip.name}:{'x'.join(map(str, sizes))}")

    def describe(self) -> str:
        """The pod in two lines, for people."""
        c = self.chip
        links = f"{c.link_bandwidth / 1e9:.0f} GB/s "
        if c.dims:
            links += f"on each of {2 * c.dims} links"
        else:
            links += f"within a node, {c.network_bandwidth / 1e9:.0f} GB/s out of it"
        return (
            f"{self.name}: {self.size} chips {c.name} in {self.hosts} hosts of {self.per_host}\n"
            f"a chip: {c.memory / 2**30:.4g} GiB of HBM at {c.memory_bandwidth / 1e9:.0f} GB/s, "
            f"{c.flops / 1e12:.0f} TFLOP/s (bfloat16), one way {links} ({c.source})\n"
        )

    def holds(self, mesh: MeshSizes) -> bool:
        """Whether the devices along each axis of a mesh are a box of the pod's places."""
        names, shape = zip(*mesh.layout.axes, strict=True)
        if math.prod(shape) != self.size:
            return True  # a part of every host
        return all(self._spans(names, shape, axis) for axis in names)

    def check_mesh(self, where: str, mesh: MeshSizes) -> None:
        """ValueError with sizes that the pod holds, where it does not hold this mesh."""
        if self.holds(mesh):
            return
        names, shape = zip(*mesh.layout.axes, strict=True)
        for axis in reversed(names):
            if self._spans(names, shape, axis):
                continue
            rest = {n: s for n, s in zip(names, shape, strict=True) if n != axis}
            fits = [n for n in range(1, self.size + 1) if self._fits(axis, n, rest)]
            raise ValueError(
                f"{where}.{axis}={dict(mesh.layout.axes)[axis]} is no box of the chips of "
                f"{self.name}, beside {rest}: use one of {fits}, and fsdp or data for what is left"
            )

    def _fits(self, axis: str, size: int, rest: dict[str, int]) -> bool:
        """Whether the axis could have that size, others giving way: fsdp, or else data."""
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
        return all(self.interconnect.span(group) for group in groups)


def open_topology(name: str) -> Pod:
    """The pod of that name: CHIP:AxBxC of a TPU's torus, or gpu:NODESxGPUS (h100, h200).

    To be called before JAX looks for devices: this process has CPUs afterwards. Raises ValueError
    or FileNotFoundError (no libtpu) with what to do.
    """
    kind, _, size = name.partition(":")
    if kind not in (*_TPU_NAMES, *_GPU_NAMES):
        raise ValueError(
            f"--topology={name}: known are {', '.join(f'{n}:...' for n in _TPU_NAMES)} with the "
            f"sizes of the torus (v5p:4x4x8, v5e:16x16), and {', '.join(_GPU_NAMES)} with nodes x "
            "GPUs (gpu:64x8 has H100s)"
        )
    sizes = tuple(int(n) for n in size.split("x")) if re.fullmatch(r"\d+(x\d+)*", size) else ()
    if kind in _GPU_NAMES:
        return _nodes(name, CHIPS["h100" if kind == "gpu" else kind], sizes)
    return _slice(name, CHIPS[kind], sizes)


def present_pod(chip: Chip) -> Pod:
    """This job's own devices as nodes of such chips: what it compiles runs here."""
    devices, per_host = canonical_order(jax.devices()), jax.local_device_count()
    hosts = len(devices) // per_host
    return Pod("here", chip, hosts, per_host, Nodes(chip, hosts, per_host), tuple(devices))


def _nodes(name: str, chip: Chip, sizes: tuple[int, ...]) -> Pod:
    if len(sizes) != 2 or not 1 <= sizes[1] <= 8 or sizes[0] < 1:
        raise ValueError(
            f"--topology={name}: write nodes x GPUs, of which a node has 1 to 8: "
            f"{chip.name}:64x8 are 512"
        )
    devices = (
        TracedDevice(number, number // sizes[1], chip.platform, chip.name)
        for number in range(math.prod(sizes))
    )
    return Pod(name, chip, *sizes, Nodes(chip, *sizes), tuple(devices))


def _slice(name: str, chip: Chip, sizes: tuple[int, ...]) -> Pod:
    most = "x".join(map(str, chip.largest))
    if len(sizes) != chip.dims or 0 in sizes:
        raise ValueError(
            f"--topology={name}: a slice of {chip.name} has {chip.dims} sizes, up to {most}: "
            f"{chip.name}:{'x'.join(['4'] * chip.dims)}"
        )
    if any(n > m for n, m in zip(sorted(sizes), chip.largest, strict=True)):
        raise ValueError(f"--topology={name}: a slice of {chip.name} has at most {most} chips")
    if importlib.util.find_spec("libtpu") is None:
        raise FileNotFoundError(
            f"--topology={name} is compiled for by libtpu, which is not installed: pip install -r "
            f"{REQUIREMENTS} (no TPU is needed)"
        )
    for key, value in _ALONE.items():
        os.environ.setdefault(key, value)
    jax.config.update("jax_platforms", "cpu")
    try:
        found = topologies.get_topology_desc(name, "tpu").devices
    except Exception as error:  # which one depends on the version
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--topology={name}: libtpu knows no such slice ({reason}); sizes that work are powers "
            f"of 2 up to {most}, of v5p multiples of 4"
        ) from error
    devices = canonical_order(found)
    places = np.array([device.coords[: chip.dims] for device in devices])
    hosts = len({device.process_index for device in devices})
    torus = Torus(chip, sizes, places)
    return Pod(name, chip, hosts, len(devices) // hosts, torus, tuple(devices))
