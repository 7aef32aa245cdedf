"""Tasks of a task buffer: one node of the graph for one group, which a worker runs.

A task is open from the moment that all fields which the node reads are there. A worker that serves
the node gets it with a lease, which no news prolong; the first result counts, whoever brings it and
whether its lease has ended or not. A second one is dropped and counted. No weights are involved, so
any worker may run any task, again too. A worker holds at most QUOTA tasks, a stalled one holds one.

Nothing here communicates, reads a clock, or looks into a result.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

from distflow_jax.stream.frames.node_frames import QUOTA
from distflow_jax.stream.leases import Leased, Leases
from distflow_jax.stream.saved_samples import Key


@dataclasses.dataclass(frozen=True)
class NodeTask:
    """One node of one group, as a task buffer holds it."""

    key: Key
    content: Any  # what a worker needs to run it
    read: Callable[[Any], Any]  # what a worker sent -> the result; ValueError for what is none
    then: Callable[[Any], None]  # called with the result, by whom takes it


@dataclasses.dataclass(eq=False)
class _Open(Leased):
    """A task without a result."""

    task: NodeTask


@dataclasses.dataclass
class TaskCounts:
    """Numbers since the task buffer began."""

    given: int = 0  # tasks that workers got
    second: int = 0  # results that were there already
    unknown: int = 0  # results of groups that nobody waits for (any more)


class NodeTasks:
    """The tasks of one process, from their beginning until their results are taken.

    Attributes:
      leases: those of the task buffer.
      served: ids of the nodes that workers run; () where trainers run all of them.
    """

    def __init__(self, leases: Leases, served: Iterable[str] = ()):
        self.leases, self.served = leases, frozenset(served)
        self.counts = TaskCounts()
        self._results: list[tuple[NodeTask, Any]] = []
        self._done: set[Key] = set()  # of groups that are not forgotten

    # -- the trainer's side -----------------------------------------------------------------------

    def begin(self, task: NodeTask) -> None:
        """Takes a task that a worker may run."""
        if task.key in self.leases.open or task.key in self._done:
            raise ValueError(f"node {task.key[1]!r} of prompt {task.key[0]} has begun already")
        self.leases.open[task.key] = _Open(task, node=task.key[1])

    def take(self) -> list[tuple[NodeTask, Any]]:
        """Tasks whose results are there and were not taken, with these."""
        taken, self._results = self._results, []
        return taken

    def forget(self, counters: Collection[int]) -> None:
        """Forgets groups that nobody waits for any more."""
        gone = set(counters)
        self.leases.forget(gone)
        self._done = {key for key in self._done if key[0] not in gone}
        self._results = [found for found in self._results if found[0].key[0] not in gone]

    def find(self, key: Key) -> NodeTask | None:
        """The task of a key that has no result yet."""
        found = self.leases.find(_Open, key)
        return None if found is None else found.task

    @property
    def has_news(self) -> bool:
        """Whether a result was not taken."""
        return bool(self._results)

    def unserved(self) -> list[str]:
        """Nodes that tasks wait for and no worker at work serves."""
        nodes = {one.node for one in self.leases.of(_Open)}
        return sorted(node for node in nodes if not self.leases.at_work(node))

    def num_open(self, node: str) -> int:
        """Tasks of a node that have no result."""
        return sum(one.node == node for one in self.leases.of(_Open))

    # -- the workers' side ------------------------------------------------------------------------

    def ask(self, worker: str, nodes: Collection[str], now: float) -> NodeTask | None:
        """Gives a worker a task of one of its nodes, that of the lowest counter, with a lease; none
        to one that holds enough."""
        self.leases.heard(worker, now, nodes)
        able = [one for one in self.leases.of(_Open) if one.node in nodes]
        stalled = worker in self.leases.stalled
        if sum(one.worker == worker for one in able) >= (1 if stalled else QUOTA):
            return None
        waiting = self.leases.waiting(worker, able)
        if not waiting:
            return None
        others = any(self.leases.at_work(node) - {worker} for node in nodes)
        one = (max if others and stalled else min)(waiting, key=lambda entry: entry.task.key)
        one.worker, one.until = worker, now + self.leases.seconds
        self.counts.given += 1
        return one.task

    def bring(self, worker: str, key: Key, result: Any) -> bool:
        """Takes the result of a task from a worker; whether it counts."""
        task = self.find(key)
        self.leases.stalled.discard(worker)
        if task is None:
            if key in self._done:
                self.counts.second += 1
            else:
                self.counts.unknown += 1
            return False
        del self.leases.open[key]
        self._done.add(key)
        self._results.append((task, result))
        return True

    def fail(self, worker: str, key: Key, why: str) -> None:
        """Notes that a worker cannot run a task; see Leases.fail."""
        if self.leases.fail(worker, key, why):
            self.forget([key[0]])
