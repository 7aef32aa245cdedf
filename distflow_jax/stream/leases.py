"""Leases of what a task buffer gives to workers, and the workers that hold them.

A group or a node of one is open from its beginning until its result is there. A lease that ends
puts it back. A worker of which a lease has ended is stalled until it brings something: it does not
count as one at work.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from distflow_jax.stream.saved_samples import Key

SAMPLING = ""  # what workers that sample serve, beside ids of nodes


@dataclasses.dataclass(eq=False, kw_only=True)
class Leased:
    """A piece of work that one worker at a time may hold."""

    node: str = SAMPLING  # that a worker must serve to hold it
    worker: str = ""  # that has a lease; "": none
    until: float = 0.0  # end of the lease
    failures: dict[str, int] = dataclasses.field(default_factory=dict)  # by worker
    silent: set[str] = dataclasses.field(default_factory=set)  # workers whose leases have ended

    def free(self) -> None:
        """Ends the lease."""
        self.worker, self.until = "", 0.0

    def fail(self, worker: str) -> bool:
        """Notes that a worker failed, once of each lease, which may have ended; whether it had
        one."""
        if self.worker != worker and worker not in self.silent:
            return False
        self.silent.discard(worker)
        if self.worker == worker:
            self.free()
        self.failures[worker] = self.failures.get(worker, 0) + 1
        return True

    def suits(self, worker: str, others: Collection[str]) -> bool:
        """Whether a worker should hold it, and none of `others`, which are at work: not if it
        failed, or let a lease of it end."""
        tried = self.failures.keys() | self.silent
        return worker not in tried or not set(others) - self.failures.keys()


W = TypeVar("W", bound=Leased)


@dataclasses.dataclass
class Worker:
    """A worker that was heard of within a lease's time."""

    heard: float = 0.0  # when, at last
    serves: set[str] = dataclasses.field(default_factory=set)  # ids of nodes, and SAMPLING


class Leases:
    """All that is open at a task buffer, by key, and the workers that live.

    Attributes:
      open: groups and nodes without a result.
      seconds: after which a lease ends without news.
      given_up: prompts that no worker can answer, with the last failure of each; the caller takes
        them out.
      expired: leases that ended without a result.
      stalled: workers of which a lease has ended, and that brought nothing since.
    """

    def __init__(self, seconds: float, max_tries: int):
        """`max_tries`: failures of a group or a node after which its prompt is given up."""
        self.seconds, self._max_tries = seconds, max_tries
        self.open: dict[Key, Leased] = {}
        self.given_up: dict[int, str] = {}
        self.expired = 0
        self.workers: dict[str, Worker] = {}
        self.stalled: set[str] = set()

    def heard(self, worker: str, now: float, serves: Iterable[str] = ()) -> None:
        """Notes that a worker lives, and what it serves."""
        known = self.workers.setdefault(worker, Worker())
        known.heard = now
        known.serves.update(serves)

    def at_work(self, node: str = SAMPLING) -> set[str]:
        """Names of workers that serve a node, live, and are not stalled."""
        able = {name for name, worker in self.workers.items() if node in worker.serves}
        return able - self.stalled

    def of(self, kind: type[W]) -> list[W]:
        """All of a kind that is open."""
        return [one for one in self.open.values() if isinstance(one, kind)]

    def find(self, kind: type[W], key: Key) -> W | None:
        """The one of a kind that is open by this key."""
        found = self.open.get(key)
        return found if isinstance(found, kind) else None

    def waiting(self, worker: str, entries: Iterable[W]) -> list[W]:
        """The entries that a worker should hold, and nobody does."""
        free = [one for one in entries if not one.worker]
        able = {node: self.at_work(node) - {worker} for node in {one.node for one in free}}
        return [one for one in free if one.suits(worker, able[one.node])]

    def fail(self, worker: str, key: Key, why: str) -> bool:
        """Notes that a worker cannot do its work, once of each lease, which may have ended; whether
        its prompt is given up by that."""
        one = self.open.get(key)
        if one is None or not one.fail(worker) or sum(one.failures.values()) < self._max_tries:
            return False
        self.given_up[key[0]] = why
        self.forget([key[0]])
        return True

    def forget(self, counters: Collection[int]) -> None:
        """Forgets all that is open of some prompts."""
        gone = set(counters)
        for key in [key for key in self.open if key[0] in gone]:
            del self.open[key]

    def leave(self, worker: str) -> None:
        """Notes that a worker has gone: what it holds is for others at once."""
        self.workers.pop(worker, None)
        for one in self.open.values():
            if one.worker == worker:
                one.free()

    def expire(self, now: float) -> Sequence[str]:
        """Ends the leases whose time is over, and forgets workers that are gone; returns those that
        live and have stalled by it."""
        ended = [one for one in self.open.values() if one.worker and now >= one.until]
        silent, before = {one.worker for one in ended}, self.stalled
        for one in ended:
            one.silent.add(one.worker)
            one.free()
        self.expired += len(ended)
        self.workers = {n: w for n, w in self.workers.items() if w.heard > now - self.seconds}
        self.stalled = (before | silent) & self.workers.keys()
        return sorted(self.stalled - before)
