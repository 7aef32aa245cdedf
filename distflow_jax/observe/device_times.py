"""How long programs have their devices, though nobody waits for them one by one."""

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax


class DeviceTimes:
    """Follows programs that are handed over and left alone.

    A program has its devices from when it is handed over, or the one before it on any of them has
    ended, until what it gives is there. Threads wait for that; they hand over nothing themselves.

    times = DeviceTimes()
    result = times.follow("update", mesh.local_devices, lambda: program(x))
    times.take()  # {"update": 0.25}
    """

    def __init__(self):
        self._pool = ThreadPoolExecutor(thread_name_prefix="device-times")
        self._followed: list[tuple[str, Collection[jax.Device], float, Future[float]]] = []

    def follow(
        self,
        name: str,
        devices: Collection[jax.Device],
        run: Callable[[], Any],
        watched: Callable[[Any], Any] = lambda found: found,
    ) -> Any:
        """What `run()` gives. `watched` picks arrays of it that nobody donates before it ends."""
        started = time.perf_counter()
        found = run()
        ended = self._pool.submit(_end, watched(found))
        self._followed.append((name, devices, started, ended))
        return found

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Waits for what still runs."""
        free: dict[jax.Device, float] = {}
        seconds: dict[str, float] = {}
        for name, devices, started, ended in self._followed:
            end = ended.result()
            begin = max([started, *(free.get(device, 0.0) for device in devices)])
            seconds[name] = seconds.get(name, 0.0) + max(0.0, end - begin)
            free |= dict.fromkeys(devices, end)
        self._followed = []
        return seconds

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


def _end(arrays: Any) -> float:
    jax.block_until_ready(arrays)
    return time.perf_counter()
