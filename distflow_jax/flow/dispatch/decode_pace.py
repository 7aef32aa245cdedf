"""Seconds of a worker's decode steps, by the number of its active slots."""

import math
from collections.abc import Sequence

NEWEST = 0.2  # weight of a new measurement against those before

Pace = Sequence[tuple[float, float]]  # (active slots, seconds of a decode step), by slots


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


def step_seconds(pace: Pace, active: float) -> float:
    """Seconds of a decode step of so many active slots; 1 where nothing was measured.

    Between two measurements on their line, beyond them on the line of the two that are nearest,
    never below 0 or falling with the slots.

    >>> [step_seconds([(2.0, 0.5), (4.0, 0.7)], n) for n in (1, 2, 3, 8)]
    [0.4, 0.5, 0.6, 1.1]
    """
    if len(pace) < 2:
        return pace[0][1] if pace else 1.0
    place = sum(1 for slots, _ in pace[1:-1] if slots < active)
    (low, at_low), (high, at_high) = pace[place], pace[place + 1]
    slope = max(0.0, at_high - at_low) / max(high - low, 1e-9)
    return round(max(at_low + slope * (active - low), 0.1 * at_low), 12)
