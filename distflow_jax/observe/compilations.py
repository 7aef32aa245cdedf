"""Counter of XLA compilations in this process.

Nothing should compile after the first step; `perf/compilations` is the number per step.
"""

import threading
from typing import Any

import jax.monitoring

# One event per program passed to XLA, in jax 0.10 to 0.12. It includes programs fetched from the
# persistent compilation cache: requests must be rare, not only the work.
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
# One more event for each program fetched from that cache.
FETCH_EVENT = "/jax/compilation_cache/cache_hits"


class Compilations:
    """Counts compilations from its creation to `close`.

    counter = Compilations()
    counter.take()  # 3, the compilations since the last call
    counter.take_fetched()  # 2, how many of them the persistent cache had
    counter.count, counter.fetched, counter.seconds  # totals
    """

    def __init__(self):
        self._lock = threading.Lock()
        self.count = self.fetched = 0
        self.seconds = 0.0
        self._taken = self._taken_fetched = 0
        self._names: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        jax.monitoring.register_event_listener(self._on_fetch)

    def _on_event(self, event: str, duration: float, **details: Any) -> None:
        if event == COMPILE_EVENT:
            with self._lock:
                self.count += 1
                self.seconds += duration
                self._names.append(str(details.get("fun_name", "unknown")))

    def _on_fetch(self, event: str, **details: Any) -> None:
        if event == FETCH_EVENT:
            with self._lock:
                self.fetched += 1

    def take(self) -> int:
        """Number of compilations since the last call."""
        with self._lock:
            number = self.count - self._taken
            self._taken = self.count
            self._names = []
        return number

    def take_fetched(self) -> int:
        """Number of programs fetched from the persistent compilation cache since the last call."""
        with self._lock:
            number = self.fetched - self._taken_fetched
            self._taken_fetched = self.fetched
        return number

    def names(self) -> list[str]:
        """Names of the functions compiled since the last `take`, in order."""
        with self._lock:
            return list(self._names)

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)
        jax.monitoring.unregister_event_listener(self._on_fetch)
