"""Rules for many workers: the task buffers that each contacts, when it asks, and for how much.

Nothing here communicates or reads a clock.
"""

import bisect
import zlib
from collections.abc import Collection

from distflow_jax.parsing.addresses import checked_address

MOST_PLACES = 16  # task buffers of a worker, where all have enough workers by it
LEAST_WORKERS = 2  # of a task buffer, where there are so many
IDLE_QUESTIONS = 50.0  # a second that are answered by nothing, of all workers at a task buffer
LEAST_SECONDS, MOST_SECONDS = 0.1, 20.0  # between two of these by one worker
SLOW_SECONDS = 0.25  # for an answer, after which others are asked for the same room
ROSTER_SECONDS = 20.0  # between two words of a worker to the roster
GONE_SECONDS = 3 * ROSTER_SECONDS  # after which it has left the roster


def places_of(rank: int, workers: int, buffers: int) -> tuple[int, ...]:
    """The task buffers, of 0 .. `buffers` - 1, of one of some workers, by its rank among them.

    All task buffers have equally many workers, but for one. A worker that joins or leaves moves
    each of the others by at most `buffers` / `workers` task buffers, rounded up.
    """
    count = min(buffers, max(MOST_PLACES, -(-LEAST_WORKERS * buffers // workers)))
    start = rank * buffers // workers
    return tuple(sorted((start + place) % buffers for place in range(count)))


class Roster:
    """The recently active workers of a run, in an order unrelated to their hosts: if a host fails,
    no task buffer loses all of its workers."""

    def __init__(self) -> None:
        self._order: list[tuple[int, str]] = []
        self._heard: dict[str, float] = {}  # the one that was silent longest first
        self._hosts: dict[str, str] = {}  # addresses of those that run environments

    def __len__(self) -> int:
        return len(self._heard)

    def __contains__(self, worker: str) -> bool:
        return worker in self._heard

    def rank(self, worker: str, now: float) -> tuple[int, int]:
        """(rank of a worker that is heard of now, number of workers)."""
        entry = _entry(worker)
        if self._heard.pop(worker, None) is None:
            bisect.insort(self._order, entry)
        self._heard[worker] = now
        while self._heard[first := next(iter(self._heard))] <= now - GONE_SECONDS:
            self.drop(first)
        return bisect.bisect_left(self._order, entry), len(self._order)

    def drop(self, worker: str) -> None:
        """Notes that a worker has gone."""
        if self._heard.pop(worker, None) is not None:
            del self._order[bisect.bisect_left(self._order, _entry(worker))]

    def meet_host(self, worker: str, address: str) -> None:
        """Notes where a host of environments answers. ValueError for what is no address."""
        self._hosts[worker] = checked_address("the address of a host", address)

    def hosts(self, at_work: Collection[str]) -> dict[str, str]:
        """The addresses of those hosts that are at work; others are forgotten."""
        self._hosts = {name: at for name, at in self._hosts.items() if name in at_work}
        return dict(self._hosts)


class Room:
    """Free capacity of a worker for which several task buffers are asked at once. None of it is
    used twice, unless a buffer is slow to answer."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[int, float]] = {}  # by place: how much, until when
        self._slow: set[int] = set()  # places that took longer the last time

    def take(self, place: int, room: int, now: float) -> int:
        """The part of all room that a task buffer may be asked for now."""
        size = self.free(room, now)
        self._asked[place] = (0 if place in self._slow else size, now + SLOW_SECONDS)
        return size

    def free(self, room: int, now: float) -> int:
        """The part of all room that no task buffer is asked for."""
        return max(0, room - sum(size for size, end in self._asked.values() if now < end))

    def give_back(self, place: int, now: float) -> None:
        """Notes that a task buffer has answered: what it gave is no room any more."""
        _, end = self._asked.pop(place, (0, now + SLOW_SECONDS))
        (self._slow.add if now >= end else self._slow.discard)(place)


def _entry(worker: str) -> tuple[int, str]:
    return zlib.crc32(worker.encode()), worker
