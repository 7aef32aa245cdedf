"""Leases of tasks, and the workers that hold them.

A task is open until its result arrives. When a lease expires, the task waits again. A worker whose
lease expired is stalled, and does not count as active, until it submits a result. Nothing here
communicates or reads a clock; a lost connection has no meaning.

One version of the weights answers an evaluation. A worker that takes part holds this version until
its responses have ended, then loads the newest again. At most one in SHARE of the active workers
takes part, and at least one, in the oldest incomplete evaluation.

  event                                          call          counts as a try
  a worker leaves in order, or an error ends it  deregister    no
  no heartbeat for a lease's time                expire        no
  its result is not used                         take_back     no
  it reports that it cannot do a task            fail          yes; after `max_tries` give_up
  its results are refused too often              end           no; it receives no more work
  no worker can answer a prompt                  give_up       the next prompt replaces it

Finished responses of a task are kept. Of unfinished ones, the tokens are kept with weight updates
in flight; at boundaries such responses start over (TaskBuffer).
"""

import collections
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from distflow_jax.stream.open_tasks import OpenTasks
from distflow_jax.stream.tasks import EVALUATION, SAMPLER, SAMPLING, GroupTask, Key, OpenTask

MOST_ENDED = 10_000  # names of workers that are remembered
SILENT = 0.6  # of a lease's time: one that lives is heard of more often, whatever it does
SHARE = 4  # workers at work, for each one that evaluates

T = TypeVar("T", bound=OpenTask)


def evaluators(
    tasks: Collection[GroupTask], workers: Collection[str]
) -> tuple[int, frozenset[str]]:
    """(version, those of `workers` that may take tasks of it); -1 and none if no task waits.

    Those that hold tasks of it come first, then those that have not tried the task that most have
    tried, in an order that all task buffers of a run have alike.
    """
    version = min((task.step for task in tasks), default=-1)
    mine = [task for task in tasks if task.step == version]
    waiting = [task for task in mine if not task.worker]
    if not waiting:
        return -1, frozenset()
    holders = {task.worker for task in mine}
    hardest = max(waiting, key=lambda task: len(task.failures.keys() | task.silent))

    def rank(worker: str) -> tuple[int, ...]:
        tried = worker in hardest.failures, worker in hardest.silent
        return (worker not in holders, *tried, zlib.crc32(f"{version} {worker}".encode()))

    return version, frozenset(sorted(workers, key=rank)[: max(1, len(workers) // SHARE)])


class Leases:
    """All open tasks of a process, by key, and the live workers.

    Attributes:
      seconds: time without a heartbeat after which a lease expires.
      given_up: prompts that no worker can answer, with the last failure of each; drained by the
        caller.
      expired: leases that ended without a result.
      workers: time of the last heartbeat, by worker, within one lease's time.
      joined: those that have started, and asked for tasks.
      moves: (worker, "joined", "left", "stalled" or "lost", groups that a lost one held, seconds
        since it was heard of); drained by the caller.
      idle: versions for which workers found nothing to sample; without workers that have work.
      stalled: workers whose lease expired and that have submitted nothing since.
      ended: workers that receive no more work, with reason and time.
      on_end: called with a worker that is ended, and the time.
      unfit: whether an error has ended a worker, and since then no token arrived that counts, and
        none left without an error.
      evaluating: a version, and the workers that evaluate it; -1 and none.
      evaluated: tasks of evaluations that have ended and were not taken.
    """

    def __init__(self, seconds: float, max_tries: int):
        """`max_tries`: failures of a task after which its prompt is given up."""
        self.seconds, self._max_tries = seconds, max_tries
        self.open = OpenTasks()
        self.given_up: dict[int, str] = {}
        self.expired = 0
        self.workers: dict[str, float] = {}
        self.joined: set[str] = set()
        self.moves = collections.deque[tuple[str, str, int, float]](maxlen=MOST_ENDED)
        self.idle: dict[str, int] = {}
        self.stalled: set[str] = set()
        self.ended: dict[str, tuple[str, float]] = {}
        self.on_end: Callable[[str, float], None] = lambda worker, now: None
        self.unfit = False
        self.evaluating: tuple[int, frozenset[str]] = (-1, frozenset())
        self.evaluated: dict[Key, GroupTask] = {}
        self._serving: dict[str, dict[str, None]] = {}  # workers by what they serve
        self._next_gone = math.inf  # before then no worker is

    def heartbeat(
        self, worker: str, now: float, serves: Iterable[str] = SAMPLER, *, starts: bool = False
    ) -> None:
        """Notes that a worker lives, and what it serves; `starts`: it may be silent for a while."""
        if not starts and worker not in self.joined:
            self.joined.add(worker)
            self.moves.append((worker, "joined", 0, 0.0))
        self.workers[worker] = now
        self._next_gone = min(self._next_gone, now + self.seconds)
        for node in serves:
            self._serving.setdefault(node, {})[worker] = None

    def at_work(self, node: str = SAMPLING) -> set[str]:
        """Names of workers that serve a node, live, and are not stalled."""
        return set(self.others("", node))

    def others(self, worker: str, node: str = SAMPLING) -> Iterator[str]:
        """Names of workers at work that serve a node, but one."""
        for name in self._serving.get(node, ()):
            if name != worker and name not in self.stalled:
                yield name

    def of(self, kind: type[T]) -> list[T]:
        """All open tasks of a kind."""
        return [task for task in self.open.values() if isinstance(task, kind)]

    def find(self, kind: type[T], key: Key) -> T | None:
        """The open task of a kind with this key."""
        found = self.open.get(key)
        return found if isinstance(found, kind) else None

    def waiting(
        self, worker: str, queues: Sequence[tuple[str, int]], *, backwards: bool
    ) -> Iterator[Any]:
        """The tasks of some queues that a worker should hold, and nobody does, in their order."""
        for task in self.open.waiting(queues, backwards=backwards):
            if task.suits(worker, self.others(worker, task.node)):
                yield task

    def comes_last(self, worker: str, nodes: Iterable[str] = (SAMPLING,)) -> bool:
        """Whether a worker gets the last tasks of all: it is stalled, and others are at work."""
        return worker in self.stalled and any(any(self.others(worker, n)) for n in nodes)

    def fail(self, worker: str, key: Key, why: str) -> None:
        """Notes that a worker cannot do a task, once of each lease, which may have ended."""
        task = self.open.get(key)
        if task is not None and task.fail(worker):
            if task.worker == worker:
                self.open.free(task)
            if sum(task.failures.values()) >= self._max_tries:
                self.give_up(task, why)

    def give_up(self, task: Any, why: str) -> None:
        """Forgets the prompt of an open task that no worker can do; an evaluation does without."""
        if task.trains:
            self.given_up[task.key[0]] = why
            self.forget([task.key[0]])
        else:
            task.lost = why
            self.end_evaluation(task)

    def evaluates(self, worker: str) -> int | None:
        """The version that a worker should hold to evaluate it; None: it takes no part."""
        version, workers = self.evaluating
        return version if worker in workers else None

    def take_evaluations(self) -> Mapping[int, Sequence[GroupTask]]:
        """The evaluations of which all tasks have ended, by version, and their tasks by counter."""
        if not self.evaluated:
            return {}
        left = {task.step for task in self.open.of_node(EVALUATION)}
        whole = [task for _, task in sorted(self.evaluated.items()) if task.step not in left]
        for task in whole:
            del self.evaluated[task.key]
        return {v: [t for t in whole if t.step == v] for v in sorted({t.step for t in whole})}

    def end_evaluation(self, task: GroupTask) -> None:
        """Notes that a task has ended, as far as workers could answer it."""
        self.open.remove(task.key)
        self.evaluated[task.key] = task

    def forget(self, counters: Collection[int]) -> None:
        """Forgets all that is open of some prompts."""
        gone = set(counters)
        for key in [key for key in self.open if key[0] in gone]:
            self.open.remove(key)

    def deregister(self, worker: str, *, unfit: bool = False) -> None:
        """Notes that a worker has gone: what it holds is for others at once."""
        self.unfit = unfit or (self.unfit and worker not in self.joined)
        if worker in self.joined:
            self.moves.append((worker, "left", 0, 0.0))
        self._drop(worker)
        for task in self.open.held(worker):
            self.open.free(task)

    def end(self, worker: str, why: str, now: float) -> None:
        """Ends a worker whose results are not used: what it holds is for others at once."""
        self.ended[worker] = why, now
        if len(self.ended) > MOST_ENDED:
            del self.ended[next(iter(self.ended))]
        self.on_end(worker, now)
        self.deregister(worker, unfit=self.unfit)

    def take_back(self, worker: str, key: Key) -> None:
        """Ends a lease of a worker whose result is not used: others should hold the task, and it is
        no try."""
        task = self.open.get(key)
        if task is not None and task.worker == worker:
            task.silent.add(worker)
            self.open.free(task)

    def expire(self, now: float) -> Sequence[str]:
        """Ends the leases whose time is over, forgets workers that are gone, and says anew which
        workers evaluate. Returns those that live and have stalled by it. One that is lost holds
        nothing any more."""
        ended = {task.key: task for task in self.open.expired(now)}
        holders = {task.worker for task in ended.values()} & self.workers.keys()
        lost = {one for one in holders if self.workers[one] < now - SILENT * self.seconds}
        if now >= self._next_gone:
            end = now - self.seconds
            lost |= {name for name, heard in self.workers.items() if heard <= end}
        ended |= {task.key: task for name in lost for task in self.open.held(name)}
        groups = {name: sum(t.worker == name for t in ended.values()) for name in lost}
        for task in ended.values():
            task.silent.add(task.worker)
            self.open.free(task)
        self.expired += len(ended)
        self.unfit = self.unfit and not lost & self.joined
        for name in sorted(lost):
            if name in self.joined:
                self.moves.append((name, "lost", groups[name], now - self.workers[name]))
            self._drop(name)
        if now >= self._next_gone:
            self._next_gone = min(self.workers.values(), default=math.inf) + self.seconds
        stalled = sorted(holders - lost - self.stalled)
        self.moves.extend((name, "stalled", 0, 0.0) for name in stalled)
        self.stalled.update(stalled)
        # a stalled one that is alone may evaluate: it has nothing else to show
        serve = self.at_work() or self._serving.get(SAMPLING, {}).keys()
        self.evaluating = evaluators(self.open.of_node(EVALUATION), serve)
        return stalled

    def _drop(self, worker: str) -> None:
        """Forgets that a worker is there."""
        self.workers.pop(worker, None)
        self.joined.discard(worker)
        self.idle.pop(worker, None)
        self.stalled.discard(worker)
        for node, serving in list(self._serving.items()):
            serving.pop(worker, None)
            if not serving:
                del self._serving[node]
