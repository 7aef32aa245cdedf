"""Leases of tasks, and the workers that hold them.

A task is open from its beginning until its result is there. A lease that ends puts it back. A
worker of which a lease has ended is stalled until it submits something: it does not count as one at
work. Nothing here communicates or reads a clock.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from distflow_jax.stream.tasks import EVALUATION, SAMPLING, Key, Task

T = TypeVar("T", bound=Task)
SAMPLER = (SAMPLING, EVALUATION)  # what a worker serves that samples


@dataclasses.dataclass
class KnownWorker:
    """A worker that was heard of within a lease's time."""

    heartbeat: float = 0.0  # when it was heard of last
    serves: set[str] = dataclasses.field(default_factory=set)  # ids of nodes, and SAMPLER
    idle: int | None = None  # version with which it found nothing to sample; None: it has work


class Leases:
    """All open tasks of a process, by key, and the workers that live.

    Attributes:
      seconds: after which a lease ends without news.
      given_up: prompts that no worker can answer, with the last failure of each; the caller takes
        them out.
      expired: leases that ended without a result.
      stalled: workers of which a lease has ended, and that submitted nothing since.
      ended: workers that get nothing any more, why and since when.
      unfit: whether an error has ended a worker, and no response came since.
    """

    def __init__(self, seconds: float, max_tries: int):
        """`max_tries`: failures of a task after which its prompt is given up."""
        self.seconds, self._max_tries = seconds, max_tries
        self.open: dict[Key, Task] = {}
        self.given_up: dict[int, str] = {}
        self.expired = 0
        self.workers: dict[str, KnownWorker] = {}
        self.stalled: set[str] = set()
        self.ended: dict[str, tuple[str, float]] = {}
        self.unfit = False

    def heartbeat(self, worker: str, now: float, serves: Iterable[str] = SAMPLER) -> None:
        """Notes that a worker lives, and what it serves."""
        known = self.workers.setdefault(worker, KnownWorker())
        known.heartbeat = now
        known.serves.update(serves)

    def at_work(self, node: str = SAMPLING) -> set[str]:
        """Names of workers that serve a node, live, and are not stalled."""
        able = {name for name, worker in self.workers.items() if node in worker.serves}
        return able - self.stalled

    def of(self, kind: type[T]) -> list[T]:
        """All open tasks of a kind."""
        return [task for task in self.open.values() if isinstance(task, kind)]

    def find(self, kind: type[T], key: Key) -> T | None:
        """The open task of a kind with this key."""
        found = self.open.get(key)
        return found if isinstance(found, kind) else None

    def waiting(self, worker: str, tasks: Iterable[T]) -> list[T]:
        """The tasks that a worker should hold, and nobody does."""
        free = [task for task in tasks if not task.worker]
        able = {node: self.at_work(node) - {worker} for node in {task.node for task in free}}
        return [task for task in free if task.suits(worker, able[task.node])]

    def fail(self, worker: str, key: Key, why: str) -> None:
        """Notes that a worker cannot do a task, once of each lease, which may have ended."""
        task = self.open.get(key)
        if task is not None and task.fail(worker):
            if sum(task.failures.values()) >= self._max_tries:
                self.give_up(task, why)

    def give_up(self, task: Task, why: str) -> None:
        """Forgets the prompt of a task that no worker can do."""
        self.given_up[task.key[0]] = why
        self.forget([task.key[0]])

    def forget(self, counters: Collection[int]) -> None:
        """Forgets all that is open of some prompts."""
        gone = set(counters)
        self.open = {key: task for key, task in self.open.items() if key[0] not in gone}

    def deregister(self, worker: str, *, unfit: bool = False) -> None:
        """Notes that a worker has gone: what it holds is for others at once."""
        self.unfit |= unfit
        self.workers.pop(worker, None)
        for task in self.open.values():
            if task.worker == worker:
                task.free()

    def end(self, worker: str, why: str, now: float) -> None:
        """Ends a worker whose results are not used: what it holds is for others at once."""
        self.ended[worker] = why, now
        self.deregister(worker)

    def take_back(self, worker: str, key: Key) -> None:
        """Ends a lease of a worker whose result is not used: others should hold the task, and it is
        no try."""
        task = self.open.get(key)
        if task is not None and task.worker == worker:
            task.silent.add(worker)
            task.free()

    def expire(self, now: float) -> Sequence[str]:
        """Ends the leases whose time is over, and forgets workers that are gone; returns those that
        live and have stalled by it."""
        ended = [task for task in self.open.values() if task.worker and now >= task.until]
        silent, before = {task.worker for task in ended}, self.stalled
        for task in ended:
            task.silent.add(task.worker)
            task.free()
        self.expired += len(ended)
        end = now - self.seconds
        self.workers = {name: w for name, w in self.workers.items() if w.heartbeat > end}
        self.stalled = (before | silent) & self.workers.keys()
        return sorted(self.stalled - before)
