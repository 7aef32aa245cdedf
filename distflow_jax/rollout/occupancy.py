"""How busy decode slots are, and what the responses without one wait for."""

from collections.abc import Callable
from typing import NamedTuple


class Occupancy(NamedTuple):
    """Sums over the sequences of a scheduler; those of several schedulers add up."""

    slots: float = 0.0  # seconds of all decode slots, while a sequence was under way
    running: float = 0.0  # seconds that sequences had one
    held: float = 0.0  # seconds that they waited for what comes from outside
    waiting: float = 0.0  # seconds that they waited for a slot
    ended: int = 0  # sequences
    reread_tokens: int = 0  # of sequences that were read again, with their prompts
    calls: int = 0  # decode calls

    def plus(self, other: "Occupancy", times: float = 1) -> "Occupancy":
        """The sum with so many times another one."""
        return Occupancy(*(mine + times * more for mine, more in zip(self, other, strict=True)))

    def metrics(self) -> dict[str, float]:
        """`perf/*` of responses in turns; none where no sequence was held."""
        if not self.held:
            return {}
        responses = max(self.ended, 1)
        return {
            "perf/slots_busy_share": self.running / self.slots,
            "perf/trajectories/tool_seconds": self.held / responses,
            "perf/trajectories/slot_seconds": self.waiting / responses,
            "perf/trajectories/reread_tokens": self.reread_tokens,
        }


class OccupancyClock:
    """The occupancy of one scheduler, which tells each change of it.

    Seconds decide nothing: they are for metrics alone. `total`: all since the clock was made.
    """

    def __init__(self, lanes: int, now: Callable[[], float]):
        self.total = Occupancy()
        self._lanes, self._now = lanes, now
        self._then, self._rate = now(), Occupancy()

    def look(self, *, running: int, held: int, waiting: int, **counted: int) -> Occupancy:
        """Notes how many sequences do what, until the next call; returns the total so far.

        `counted`: what has been done at once, by the field's name.
        """
        now = self._now()
        self.total = self.total.plus(self._rate, now - self._then).plus(Occupancy(**counted))
        slots = self._lanes if running or held or waiting else 0
        self._then, self._rate = now, Occupancy(slots, running, held, waiting)
        return self.total
