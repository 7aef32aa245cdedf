"""What a run finds: processes and devices, of this job or of one that is planned for."""

import dataclasses

import jax

from distflow_jax.parallel.device_memory import device_memory_bytes


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a run finds: processes and devices."""

    processes: int
    devices: int
    local_devices: int
    platform: str
    memory: int = 0  # bytes of one device that a run may take; 0 where it is not known

    @classmethod
    def current(cls) -> "Machine":
        """This job's."""
        return cls(
            jax.process_count(),
            jax.device_count(),
            jax.local_device_count(),
            jax.default_backend(),
            device_memory_bytes() >> 30 << 30,  # equal hosts differ by some MiB
        )

    def submesh(self, local_devices: int) -> "Machine":
        """The same machine with so many devices of each host."""
        return dataclasses.replace(
            self, devices=self.processes * local_devices, local_devices=local_devices
        )
