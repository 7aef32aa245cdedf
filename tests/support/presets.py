"""The shipped configs of machines, and the smallest machine of each."""

import math

import numpy as np

from distflow_jax.planning.chips import CHIPS
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.machine_names import named_machine
from distflow_jax.pods.interconnect import Nodes, Torus
from distflow_jax.pods.topology import Pod, TracedDevice
from support.paths import ROOT

PRESETS = [path.stem for path in sorted((ROOT / "configs").glob("qwen*.py"))]


def least_machine(kind, division):
    """The name of the smallest machine of that kind of chip for a division."""
    chip = CHIPS[kind]
    return f"{kind}-{division.devices // chip.devices * chip.counted}"


def traced_pod(name):
    """The machine as numbers alone, as GPUs are planned: libtpu is not needed."""
    machine = named_machine(name)
    of = Machine.of(machine)
    chip, ids = machine.chip, range(of.devices)
    if chip.dims:
        places = np.stack(np.unravel_index(np.arange(math.prod(machine.sizes)), machine.sizes), 1)
        links = Torus(chip, machine.sizes, np.repeat(places, chip.devices, axis=0))
    else:
        links = Nodes(chip, *machine.sizes)
    devices = [TracedDevice(i, i // of.local_devices, chip.platform, chip.name) for i in ids]
    return Pod(machine.topology, chip, of.processes, of.local_devices, links, tuple(devices))
