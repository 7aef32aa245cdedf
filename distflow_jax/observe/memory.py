"""Peak memory: of a process's fullest accelerator, or of the process itself on CPU."""

import pathlib
import resource
import sys

import jax

GIB = 1024**3  # verl's "gb"


def peak_memory_gb() -> float:
    """Peak memory so far, in units of 2^30 bytes.

    On accelerators the largest peak of this process's devices, by their allocator's count; on CPU
    the peak resident size of the process.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat and "peak_bytes_in_use" in stat]
    return (max(peaks) if peaks else _peak_resident_bytes()) / GIB


def _peak_resident_bytes() -> int:
    # not getrusage on Linux: there a child process starts with its parent's peak
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
