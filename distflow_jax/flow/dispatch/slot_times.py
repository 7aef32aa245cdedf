"""A worker's own times: the seconds of its decode steps, by the number of its active slots."""

import time
from collections.abc import Callable

from distflow_jax.flow.dispatch.decode_pace import DecodePace
from distflow_jax.flow.dispatch.fleet import Report


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
