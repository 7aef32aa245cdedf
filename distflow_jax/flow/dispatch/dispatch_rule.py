"""Dispatch by expected lengths and measured times: a pure function over plain numbers.

A worker that asks gets some of the groups that may begin, the longest expected first. Two rules say
how many:

- longest: as many as the worker has slots for.
- paced: the same, but at most as many as keep the end of the step earliest. A worker that decodes
  half as fast takes half as much, and leaves the rest to others.

The end of a step is predicted by the seconds of a decode step that each worker has measured, and
the tokens that are expected. Nothing waits for ever: a worker without an active slot always gets
something.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

DISPATCHES = ("longest", "paced")
NEAR = 1.01  # ends that differ by less count as equal: then more is given

Pace = Sequence[tuple[float, float]]  # (active slots, seconds of a decode step), by slots


@dataclasses.dataclass(frozen=True)
class Offer:
    """A group that may begin, as numbers."""

    begun: bool  # some of its tokens are known
    responses: int  # that have not ended
    length: float  # expected tokens that the longest of these lacks
    tokens: float  # expected tokens that all of them lack


@dataclasses.dataclass(frozen=True)
class Load:
    """A worker, as numbers."""

    slots: int
    active: int  # of the slots
    longest: float  # expected tokens that the longest of its responses lacks
    tokens: float  # expected tokens that all of them lack
    pace: Pace

    def seconds(self, more: float = 0.0) -> float:
        """Seconds of a decode step with `more` active slots than now, at most all."""
        return step_seconds(self.pace, min(self.slots, self.active + more))


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


def choose(offers: Sequence[Offer], room: int, asker: str, fleet: Mapping[str, Load]) -> int:
    """How many of the offers a worker gets, from the first on.

    `offers`: groups that the worker may answer, in the order of steps and expected lengths. `room`:
    responses that it has slots for; the last group may exceed it. `fleet`: all workers by name,
    the one that asks among them; of fewer than two it gets all that finds room.
    """
    fitting = _fitting(offers, room)
    if len(fleet) > 1:
        begun = sum(1 for offer in offers[:fitting] if offer.begun)
        fitting = min(fitting, max(_most(offers, fitting, asker, fleet), begun))
    return fitting


def _fitting(offers: Iterable[Offer], room: int) -> int:
    """How many groups find room, the last one in part."""
    fitting = 0
    for offer in offers:
        if room <= 0:
            break
        fitting, room = fitting + 1, room - offer.responses
    return fitting


@dataclasses.dataclass(frozen=True)
class _Sum:
    """Several groups together."""

    responses: int
    longest: float  # tokens
    tokens: float


NOTHING = _Sum(0, 0.0, 0.0)


def _most(offers: Sequence[Offer], fitting: int, asker: str, fleet: Mapping[str, Load]) -> int:
    """How many of the first `fitting` groups keep the predicted end earliest."""
    if not fitting:
        return 0
    own, others = fleet[asker], [load for name, load in fleet.items() if name != asker]
    mine, ends = _added(offers[:fitting], NOTHING), []
    rest = _added(offers[fitting:], NOTHING)[-1]
    left = _added(reversed(offers[:fitting]), rest)[::-1]
    for more, others_more in zip(mine, left, strict=True):
        ends.append(max(_end(own, more), _end_of_all(others, others_more)))
    earliest = min(ends)
    most = max(count for count, end in enumerate(ends) if end <= NEAR * earliest)
    return max(most, 1) if not own.active else most


def _added(offers: Iterable[Offer], first: _Sum) -> list[_Sum]:
    """`first`, and then with one group after the other."""
    sums = [first]
    for offer in offers:
        last = sums[-1]
        longest = max(last.longest, offer.length)
        sums.append(_Sum(last.responses + offer.responses, longest, last.tokens + offer.tokens))
    return sums


def _end(load: Load, more: _Sum) -> float:
    """Seconds until one worker has ended what it has, and `more`."""
    active = min(load.slots, load.active + more.responses)
    if not active:
        return 0.0
    tokens = (load.tokens + more.tokens) / active
    return load.seconds(active - load.active) * max(load.longest, more.longest, tokens)


def _end_of_all(loads: Sequence[Load], more: _Sum) -> float:
    """Seconds until several workers have ended what they have, and `more`, which they share."""
    free = sum(load.slots - load.active for load in loads)
    share = min(1.0, more.responses / free) if free else 0.0
    rate, end, swiftest = 0.0, 0.0, math.inf
    for load in loads:
        added = share * (load.slots - load.active)
        seconds = load.seconds(added)
        rate += (load.active + added) / seconds
        end, swiftest = max(end, load.longest * seconds), min(swiftest, seconds)
    tokens = more.tokens + sum(load.tokens for load in loads)
    if more.responses:
        end = max(end, more.longest * swiftest)
    return max(end, tokens / rate if rate else math.inf if tokens else 0.0)
