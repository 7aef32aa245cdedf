"""Memory of devices: its size, and the bytes of live arrays."""

import collections
import os

import jax

from distflow_jax.parallel.host_memory import buffers


def device_memory_bytes() -> int:
    """Memory of one of this process's devices, in bytes; 0 if the platform does not report it.

    A CPU device has an equal share of the host's memory.
    """
    local = jax.local_devices()
    if local[0].platform == "cpu":
        return host_memory_bytes() // len(local)
    stats = local[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0))


def host_memory_bytes() -> int:
    """Memory of this host, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def live_bytes() -> int:
    """Bytes of live arrays on the fullest of this process's devices."""
    total: dict[jax.Device, int] = collections.defaultdict(int)
    for (device, kind, _), size in buffers(jax.live_arrays()).items():
        if kind == device.default_memory().kind:
            total[device] += size
    return max(total.values(), default=0)
