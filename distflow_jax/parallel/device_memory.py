"""How much memory a device has."""

import os

import jax


def device_memory_bytes() -> int:
    """Bytes of one of this process's devices, of a CPU's its share of the host's; 0: unknown."""
    local = jax.local_devices()
    if local[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    stats = local[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0))
