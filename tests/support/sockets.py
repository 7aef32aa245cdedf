"""Threads, descriptors and resident memory of this process, and threads of callers."""

import gc
import os
import threading
import time
from pathlib import Path


def open_files() -> int:
    """Descriptors that are open."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Memory that this process occupies."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(count, least, seconds=5.0) -> int:
    """`count()` once it is at most `least`, or what it is after some seconds."""
    end = time.monotonic() + seconds
    while count() > least and time.monotonic() < end:
        gc.collect()
        time.sleep(0.02)
    return count()


def threads() -> int:
    """Threads of this process, those of gRPC's core aside."""
    return threading.active_count()
