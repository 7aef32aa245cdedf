"""Threads, descriptors and resident memory of this process, and threads of callers."""

import gc
import os
import threading
from pathlib import Path

from support.waiting import until


def open_files() -> int:
    """Descriptors that are open."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Memory that this process occupies."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settle(count, most) -> None:
    """Waits until `count()` is at most `most`."""

    def is_settled():
        gc.collect()
        return count() <= most

    until(is_settled, lambda: f"{count()} are left, at most {most} may be")


def threads() -> int:
    """Threads of this process, those of gRPC's core aside."""
    return threading.active_count()
