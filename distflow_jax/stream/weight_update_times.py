"""Times of weight updates, and the metrics derived from them."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from distflow_jax.layout import Parts

_NAMES = ("leave", "arrive", "exposed", "hidden")
_BYTES = "bytes"


class WeightUpdateTimes:
    """Times both halves of weight updates: weights leave the trainer, and arrive on the sampler's
    devices.

    A second is exposed if it delays training: the trainer sends weights, or waits for samples while
    the sampler loads weights instead of decoding. Sampler seconds that overlap with training are
    hidden. Any thread may begin and end blocks.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now, self._lock = now, threading.Lock()
        self._then = now()
        self._running: list[str] = []  # blocks that have begun and not ended
        self._seconds = dict.fromkeys(_NAMES, 0.0)
        self._bytes = 0

    def moved(self, count: int) -> None:
        """Counts bytes of weights that came to the sampler, or to its host."""
        with self._lock:
            self._bytes += count

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """A block in which weights "leave" or "arrive", or the training does "wait" for samples."""
        with self._lock:
            self._advance()
            self._running.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._advance()
                self._running.remove(name)

    def take(self) -> Parts:
        """Seconds since the last call, those of blocks that still run included, and bytes."""
        with self._lock:
            self._advance()
            numbers = [*(self._seconds[name] for name in _NAMES), float(self._bytes)]
            self._seconds, self._bytes = dict.fromkeys(_NAMES, 0.0), 0
        return Parts((numbers,), means)

    def _advance(self) -> None:
        now = self._now()
        passed, self._then = now - self._then, now
        leave, arrive = ("leave" in self._running, "arrive" in self._running)
        exposed = leave or (arrive and "wait" in self._running)
        for name, counts in zip(
            _NAMES, (leave, arrive, exposed, arrive and not exposed), strict=True
        ):
            self._seconds[name] += passed * counts


def means(of_all: Sequence[Sequence[float]]) -> dict[str, float]:
    """Metrics `perf/weight_update/*`: means over all processes."""
    return {
        f"perf/weight_update/{name}": sum(values) / len(of_all)
        for name, values in zip((*_NAMES, _BYTES), zip(*of_all, strict=True), strict=True)
    }
