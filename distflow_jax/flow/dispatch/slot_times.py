"""A worker's own times: the seconds of its decode steps, by the number of its active slots."""

import math
import time
from collections.abc import Callable

from distflow_jax.flow.dispatch.fleet import Report

NEWEST = 0.2  # weight of a new measurement against those before


class DecodePace:
    """Measured seconds of decode steps, smoothed, one number for each doubling of slots."""

    def __init__(self):
        self._known: dict[int, tuple[float, float]] = {}  # by the slots' binary logarithm

    def note(self, active: int, tokens: int, seconds: float) -> None:
        """Notes that `active` slots decoded so many tokens in so many seconds."""
        if active < 1 or tokens < 1 or not 0 < seconds < math.inf:
            return
        found, place = (float(active), seconds * active / tokens), int(math.log2(active))
        before = self._known.get(place, found)
        slots, step = (b + NEWEST * (f - b) for b, f in zip(before, found, strict=True))
        self._known[place] = slots, step

    def table(self) -> list[tuple[float, float]]:
        """(active slots, seconds of a decode step), the fewest slots first."""
        return sorted(self._known.values())


class SlotTimes:
    """Measures a worker by one call after each of its rounds."""

    def __init__(self, slots: int = 0, now: Callable[[], float] = time.monotonic):
        self._slots, self._now, self._pace = slots, now, DecodePace()
        self._then, self._tokens = now(), 0
        self._active = 0  # slots of the decode call that the next round awaits

    def round(self, under_way: int, tokens: int) -> None:
        """Notes responses under way after a round, and all tokens sampled so far."""
        now = self._now()
        passed, self._then = now - self._then, now
        self._pace.note(self._active, tokens - self._tokens, passed)
        self._tokens, self._active = tokens, min(under_way, self._slots)

    def report(self, room: int) -> Report:
        """Numbers for homes, with a question for `room` responses."""
        return Report(
            self._slots,
            self._slots - min(max(room, 0), self._slots),  # below 0: some wait for slots
            tuple(self._pace.table()),
        )
