"""Leases of what a home gives to workers, and the workers that hold them.

A lease that ends puts its group, or its node task, back. A worker of which a lease has ended is
stalled until it brings something: it does not count as one at work.
"""

import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(eq=False, kw_only=True)
class Leased:
    """A piece of work that one worker at a time may hold."""

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

    @property
    def tries(self) -> int:
        """Failures of all workers."""
        return sum(self.failures.values())

    def suits(self, worker: str, others: set[str]) -> bool:
        """Whether a worker should hold it, and none of `others`, which are at work: not if it
        failed, or let a lease of it end."""
        tried = self.failures.keys() | self.silent
        return worker not in tried or not others - self.failures.keys()


class Workers:
    """The workers of a home.

    Attributes:
      heard: those that were heard of within a lease's time, and when.
      stalled: those of them of which a lease has ended, and that brought nothing since.
    """

    def __init__(self, lease_seconds: float):
        """`lease_seconds`: after which a lease ends without news."""
        self._lease_seconds = lease_seconds
        self.heard: dict[str, float] = {}
        self.stalled: set[str] = set()

    def at_work(self) -> set[str]:
        """Names of workers that live and are not stalled."""
        return self.heard.keys() - self.stalled

    def leave(self, worker: str, leases: Iterable[Leased]) -> None:
        """Notes that one has gone: what it holds is for others at once."""
        self.heard.pop(worker, None)
        for one in leases:
            if one.worker == worker:
                one.free()

    def expire(self, leases: Iterable[Leased], now: float) -> tuple[int, Sequence[str]]:
        """Ends the leases whose time is over, and forgets workers that are gone; returns the number
        of leases, and the living workers that have stalled by it."""
        ended = [one for one in leases if one.worker and now >= one.until]
        silent = {one.worker for one in ended}
        for one in ended:
            one.silent.add(one.worker)
            one.free()
        end, before = now - self._lease_seconds, self.stalled
        self.heard = {worker: then for worker, then in self.heard.items() if then > end}
        self.stalled = (before | silent) & self.heard.keys()
        return len(ended), sorted(self.stalled - before)
