"""Tasks of a home: one node of the graph for one group, which a worker runs.

A task is open from the moment that all fields which the node reads are there. A worker that serves
the node gets it with a lease; the first result counts, whoever brings it and whether its lease has
ended or not. A second one is dropped and counted. No weights are involved, so any worker may run
any task, again too. A worker holds at most QUOTA tasks. One of which a lease has ended is stalled:
until it brings a result it gets one task at a time, and does not count as a worker at work.

Nothing here communicates, reads a clock, or looks into a result.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from distflow_jax.flow.homes.leases import Leased, Workers
from distflow_jax.flow.saved_samples import Key

QUOTA = 2  # tasks of a worker: one that runs, and one that is next


@dataclasses.dataclass(frozen=True)
class NodeTask:
    """One node of one group, as a home holds it."""

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
    """Numbers since the home began."""

    given: int = 0  # tasks that workers got
    expired: int = 0  # leases that ended without a result
    second: int = 0  # results that were there already
    unknown: int = 0  # results of groups that nobody waits for (any more)


class NodeTasks:
    """The tasks of one process, from their beginning until their results are taken.

    Attributes:
      served: ids of the nodes that workers run; () where trainers run all of them.
      given_up: prompts that no worker can run a node on, with the last failure of each; the caller
        takes them out.
      workers: those that live.
    """

    def __init__(
        self, served: Iterable[str] = (), *, lease_seconds: float = 60.0, max_tries: int = 3
    ):
        """`lease_seconds`: after which a task without a result is given to another worker;
        `max_tries`: failures of a task after which its prompt is given up."""
        self.served = frozenset(served)
        self.counts = TaskCounts()
        self.given_up: dict[int, str] = {}
        self.workers = Workers(lease_seconds)
        self._nodes: dict[str, frozenset[str]] = {}  # that they serve
        self._lease_seconds, self._max_tries = lease_seconds, max_tries
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
        """Nodes that tasks wait for and no worker at work serves."""
        served = {node for worker in self.workers.at_work() for node in self._nodes[worker]}
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
            for name in self.workers.at_work()
            if name != worker and not self._nodes[name].isdisjoint(nodes)
        }
        stalled = worker in self.workers.stalled
        if sum(one.worker == worker for one in able) >= (1 if stalled else QUOTA):
            return None
        waiting = [one for one in able if not one.worker and self._suits(one, worker, others)]
        if not waiting:
            return None
        one = (max if others and stalled else min)(waiting, key=lambda entry: entry.task.key)
        one.worker, one.until = worker, now + self._lease_seconds
        self.counts.given += 1
        return one.task

    def bring(self, worker: str, key: Key, result: Any) -> bool:
        """Takes the result of a task from a worker; whether it counts."""
        one = self._open.pop(key, None)
        self.workers.stalled.discard(worker)
        if one is None:
            if key in self._done:
                self.counts.second += 1
            else:
                self.counts.unknown += 1
            return False
        self._done.add(key)
        self._results.append((one.task, result))
        return True

    def fail(self, worker: str, key: Key, why: str) -> None:
        """Notes that a worker cannot run a task, once of each lease, which may have ended."""
        one = self._open.get(key)
        if one is not None and one.fail(worker) and one.tries >= self._max_tries:
            self.forget([key[0]])
            self.given_up[key[0]] = why

    def heard(self, worker: str, nodes: Collection[str], now: float) -> None:
        """Notes that a worker lives, and which nodes it serves."""
        self.workers.heard[worker], self._nodes[worker] = now, frozenset(nodes)

    def leave(self, worker: str) -> None:
        """Notes that a worker has gone: its tasks are for others at once."""
        self.workers.leave(worker, self._open.values())
        self._nodes.pop(worker, None)

    def expire(self, now: float) -> Sequence[str]:
        """Ends the leases whose time is over, and forgets workers that are gone; returns those that
        live and have stalled by it."""
        expired, stalled = self.workers.expire(self._open.values(), now)
        self.counts.expired += expired
        self._nodes = {name: self._nodes[name] for name in self.workers.heard}
        return stalled

    def _suits(self, one: _Open, worker: str, others: set[str]) -> bool:
        """Whether a worker should run a task, and no other one at work that serves its node."""
        able = {name for name in others if one.task.key[1] in self._nodes[name]}
        return one.suits(worker, able)
