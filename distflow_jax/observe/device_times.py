"""Device time of asynchronously dispatched programs."""

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax


class DeviceTimes:
    """Measures the device time of programs without blocking the main thread.

    A program occupies its devices from its dispatch, or from the end of the program before it on
    any of them, until its outputs are ready. Threads wait for outputs; they dispatch nothing.

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
        """Calls `run()` and measures it as `name` on `devices`; returns its result.

        `watched` picks arrays of the result that nobody donates or deletes: they are the thread's
        too until the program has ended.
        """
        started = time.perf_counter()
        found = run()
        ended = self._pool.submit(_end, watched(found))
        self._followed.append((name, devices, started, ended))
        return found

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Waits for running programs."""
        free: dict[jax.Device, float] = {}
        seconds: dict[str, float] = {}
        followed, self._followed = self._followed, []
        for name, devices, started, ended in followed:
            end = ended.result()
            begin = max([started, *(free.get(device, 0.0) for device in devices)])
            seconds[name] = seconds.get(name, 0.0) + max(0.0, end - begin)
            free |= dict.fromkeys(devices, end)
        return seconds

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


def _end(arrays: Any) -> float:
    jax.block_until_ready(arrays)
    return time.perf_counter()
