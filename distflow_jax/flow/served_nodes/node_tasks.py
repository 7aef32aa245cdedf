"""Tasks of a home: one node of the graph for one group, which a worker runs.

A task is open from the moment that all fields which the node reads are there. A worker that serves
the node gets it with a lease; the first result counts, whoever brings it and whether its lease has
ended or not. A second one is dropped and counted. No weights are involved, so any worker may run
any task, again too. How many a worker may hold follows from its results: dispatch/standings.py.

Nothing here communicates, reads a clock, or looks into a result.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

from distflow_jax.flow.dispatch.standings import Standings

Key = tuple[int, str]  # counter of the prompt, id of the node


@dataclasses.dataclass(frozen=True)
class NodeTask:
    """One node of one group, as a home holds it."""

    key: Key
    content: Any  # what a worker needs to run it
    read: Callable[[Any], Any]  # what a worker sent -> the result; ValueError for what is none
    then: Callable[[Any], None]  # called with the result, by whom takes it


@dataclasses.dataclass(eq=False)
class _Open:
    """A task without a result."""

    task: NodeTask
    worker: str = ""  # that has a lease; "": none
    until: float = 0.0  # end of the lease
    failures: dict[str, int] = dataclasses.field(default_factory=dict)  # by worker
    silent: set[str] = dataclasses.field(default_factory=set)  # workers whose leases have ended

    def free(self) -> None:
        """Ends the lease."""
        self.worker, self.until = "", 0.0


@dataclasses.dataclass
class TaskCounts:
    """Numbers since the home began."""

    given: int = 0  # tasks that workers got
    expired: int = 0  # leases that ended without a result
    second: int = 0  # results that were there already
    unknown: int = 0  # results of groups that nobody waits for (any more)


@dataclasses.dataclass(frozen=True)
class _Server:
    """A worker that serves nodes."""

    nodes: frozenset[str]
    heard: float


class NodeTasks:
    """The tasks of one process, from their beginning until their results are taken.

    Attributes:
      served: ids of the nodes that workers run; () where trainers run all of them.
      given_up: prompts that no worker can run a node on, with the last failure of each; the caller
        takes them out.
      workers: those that were heard of within a lease's time.
      standings: which of them give what they got.
    """

    def __init__(
        self, served: Iterable[str] = (), *, lease_seconds: float = 60.0, max_tries: int = 3
    ):
        """`lease_seconds`: after which a task without a result is given to another worker;
        `max_tries`: failures of a task after which its prompt is given up."""
        self.served = frozenset(served)
        self.counts = TaskCounts()
        self.given_up: dict[int, str] = {}
        self.workers: dict[str, _Server] = {}
        self._lease_seconds, self._max_tries = lease_seconds, max_tries
        self.standings = Standings(lease_seconds)
        self._open: dict[Key, _Open] = {}
        self._results: list[tuple[NodeTask, Any]] = []
        self._done: set[Key] = set()  # of groups that are not forgotten

    # -- the trainer's side -----------------------------------------------------------------------

    def begin(self, task: NodeTask) -> None:
        """Takes a task that a worker may run."""
        if task.key in self._open or task.key in self._done:
            raise ValueError(f"node {task.key[1]!r} of prompt {task.key[0]} has begun already")
        self._open[task.key] = _Open(task)

    def take(self) -> list[tuple[NodeTask, Any]]:
        """Tasks whose results are there and were not taken, with these."""
        taken, self._results = self._results, []
        return taken

    def forget(self, counters: Collection[int]) -> None:
        """Forgets groups that nobody waits for any more."""
        gone = set(counters)
        for key in [key for key in self._open if key[0] in gone]:
            del self._open[key]
        self._done = {key for key in self._done if key[0] not in gone}
        self._results = [found for found in self._results if found[0].key[0] not in gone]

    def find(self, key: Key) -> NodeTask | None:
        """The task of a key that has no result yet."""
        found = self._open.get(key)
        return None if found is None else found.task

    @property
    def has_news(self) -> bool:
        """Whether a result, or a prompt that is given up, was not taken."""
        return bool(self._results or self.given_up)

    def unserved(self) -> list[str]:
        """Nodes that tasks wait for and no worker serves that gives what it got."""
        giving = self.standings.giving(self.workers)
        served = {node for worker in giving for node in self.workers[worker].nodes}
        return sorted({node for _, node in self._open} - served)

    def num_open(self, node: str) -> int:
        """Tasks of a node that have no result."""
        return sum(1 for _, one in self._open if one == node)

    # -- the workers' side ------------------------------------------------------------------------

    def ask(self, worker: str, nodes: Collection[str], now: float) -> NodeTask | None:
        """Gives a worker a task of one of its nodes, that of the lowest counter, with a lease; none
        to one that holds enough."""
        self.heard(worker, nodes, now)
        able = [one for key, one in self._open.items() if key[1] in nodes]
        others = {
            name
            for name in self.standings.giving(self.workers)
            if name != worker and not self.workers[name].nodes.isdisjoint(nodes)
        }
        most = self.standings.most(worker, len(able), len(others), now)
        if sum(one.worker == worker for one in able) >= most:
            return None
        waiting = [one for one in able if not one.worker and self._fits(one, worker, others)]
        if not waiting:
            return None
        last = bool(others) and not self.standings.gives(worker)
        one = (max if last else min)(waiting, key=lambda entry: entry.task.key)
        one.worker, one.until = worker, now + self._lease_seconds
        self.counts.given += 1
        return one.task

    def bring(self, worker: str, key: Key, result: Any, now: float) -> bool:
        """Takes the result of a task from a worker; whether it counts."""
        one = self._open.pop(key, None)
        if one is None:
            if key in self._done:
                self.counts.second += 1
            else:
                self.counts.unknown += 1
            return False
        self.standings.note(worker, 1, now)
        self._done.add(key)
        self._results.append((one.task, result))
        return True

    def fail(self, worker: str, key: Key, why: str) -> None:
        """Notes that a worker cannot run a task, once of each lease, which may have ended."""
        one = self._open.get(key)
        if one is None or (one.worker != worker and worker not in one.silent):
            return
        one.silent.discard(worker)
        if one.worker == worker:
            one.free()
        one.failures[worker] = one.failures.get(worker, 0) + 1
        if sum(one.failures.values()) >= self._max_tries:
            self.forget([key[0]])
            self.given_up[key[0]] = why

    def heard(self, worker: str, nodes: Collection[str], now: float) -> None:
        """Notes that a worker lives, and which nodes it serves."""
        self.workers[worker] = _Server(frozenset(nodes), now)

    def leave(self, worker: str) -> None:
        """Notes that a worker has gone: its tasks are for others at once."""
        self.workers.pop(worker, None)
        for one in self._open.values():
            if one.worker == worker:
                one.free()

    def expire(self, now: float) -> None:
        """Ends the leases whose time is over, and forgets workers that are gone."""
        ended: dict[str, float] = {}
        for one in self._open.values():
            if one.worker and now >= one.until:
                self.counts.expired += 1
                since = one.until - self._lease_seconds
                ended[one.worker] = max(since, ended.get(one.worker, since))
                one.silent.add(one.worker)
                one.free()
        for worker, since in ended.items():
            self.standings.end(worker, since, now)
        end = now - self._lease_seconds
        self.workers = {name: one for name, one in self.workers.items() if one.heard > end}
        self.standings.keep(self.workers, now)

    def _fits(self, one: _Open, worker: str, others: set[str]) -> bool:
        """Whether a worker should run a task: one that failed on it, or gave nothing, only if none
        of the others that give what they get could."""
        node = one.task.key[1]
        able = {name for name in others if node in self.workers[name].nodes}
        if worker in one.silent and able and not self.standings.gives(worker):
            return False
        return worker not in one.failures or not able - one.failures.keys()
