"""Processes and devices of a job: of the current one, or of one that is planned for."""

import dataclasses

import jax

from distflow_jax.parallel.host_memory import device_memory_bytes, host_memory_bytes
from distflow_jax.planning.chips import chip_of
from distflow_jax.planning.machine_names import NamedMachine


@dataclasses.dataclass(frozen=True)
class Machine:
    """Processes and devices of a job."""

    processes: int
    devices: int  # of all processes
    local_devices: int  # of each process
    platform: str
    memory: int = 0  # bytes of one device available to a run; 0 if unknown
    host_memory: int = 0  # bytes of a host; 0 if unknown
    chip: str = ""  # of planning/chips.py, or jax's name of another device; "" if unknown

    @classmethod
    def current(cls) -> "Machine":
        """The machine of the current job; memory in whole GiB: equal hosts differ by some MiB."""
        kind = jax.devices()[0].device_kind
        chip = chip_of(kind)
        return cls(
            jax.process_count(),
            jax.device_count(),
            jax.local_device_count(),
            jax.default_backend(),
            *(size >> 30 << 30 for size in (device_memory_bytes(), host_memory_bytes())),
            chip=chip.name if chip else kind,
        )

    @classmethod
    def of(cls, named: NamedMachine) -> "Machine":
        """A machine by name; the memory of its hosts is unknown."""
        chip, hosts, devices = named.chip, named.hosts, named.devices
        each = devices // hosts
        return cls(hosts, devices, each, chip.platform, memory=chip.memory, chip=chip.name)

    def submesh(self, local_devices: int) -> "Machine":
        """The same machine with `local_devices` devices per host."""
        return dataclasses.replace(
            self, devices=self.processes * local_devices, local_devices=local_devices
        )
