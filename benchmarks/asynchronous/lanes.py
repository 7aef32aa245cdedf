"""Lanes: simulated devices whose work is a sleep, one piece after the other."""

import collections
import threading
import time


class Lane:
    """Devices of one process that work together; `begin` returns at once, as a dispatch does."""

    def __init__(self, devices: int):
        self.devices = devices
        self.busy: collections.Counter[str] = collections.Counter()  # seconds by kind of work
        self._lock = threading.Lock()
        self._free = 0.0  # when the last piece of work ends

    def begin(self, kind: str, seconds: float, after: float = 0.0) -> float:
        """Queues work behind all that was begun before, not before the time `after`; returns when
        it ends, on the clock of time.perf_counter."""
        with self._lock:
            start = max(self._free, time.perf_counter(), after)
            self._free = start + seconds
            self.busy[kind] += seconds
            return self._free

    def run(self, kind: str, seconds: float, after: float = 0.0) -> None:
        """Works, and waits for the end."""
        wait_until(self.begin(kind, seconds, after))

    def wait(self) -> None:
        """Waits for the end of all work that was begun."""
        with self._lock:
            end = self._free
        wait_until(end)


def wait_until(end: float) -> None:
    """Sleeps until a time on the clock of time.perf_counter."""
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)
