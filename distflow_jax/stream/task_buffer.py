"""The task buffer of a process: the groups that it trains on, from their prompts to their results.

A worker leases groups to sample, and submits complete responses and the tokens of unfinished ones.
When a lease expires, its group waits again with the known tokens; with `exact` versions no token of
an unfinished response is kept, so such a response starts over. The rule of schedule.py decides
which group may begin with the worker's version. A worker holds at most twice as many responses as
it has slots, or a single group, the last one, while it is stalled.

Workers that serve graph nodes lease one node of one group at a time, once all fields that the node
reads exist; heartbeats do not extend such a lease. The first result of a response or node counts,
whichever worker submits it; a second one is dropped and counted.

Nothing here communicates, reads a clock, or inspects a token.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from distflow_jax.stream.leases import Leases
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.tasks import (
    NODE_QUOTA,
    SAMPLER,
    SAMPLING,
    GroupTask,
    Key,
    NodeTask,
    OpenTask,
    Piece,
)

ANSWER_BYTES = 32 << 20  # of the groups that one question is answered by, but for the first one
QUOTA = 2  # responses of a worker for each of its slots: some have ended, and are on their way


@dataclasses.dataclass
class TaskCounts:
    """Counters since the task buffer started."""

    second: int = 0  # results that were there already
    differing: int = 0  # second responses that differ, with exact versions


class TaskBuffer(Leases):
    """The tasks of one process, from creation until their results are taken.

    Args:
      rule: says which versions may answer which step.
      exact: whether one version answers each step.
      version: of the newest weights; with `exact` it replaces older ones.
      lease_seconds: time without a heartbeat after which a task goes to another worker.
      max_tries: failures of a task after which its prompt is given up.
      served: ids of the nodes that workers run.
      environment_seconds: maximum time that environment calls may take per response.
      differs: locates the difference between two results of one response; None: they are equal.

    Attributes:
      newest: version of the newest weights available to workers.
      differing: (key, sample, where) of differing second results; drained by the caller.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        exact: bool,
        version: int,
        lease_seconds: float,
        max_tries: int,
        served: Iterable[str] = (),
        environment_seconds: float = 0.0,
        differs: Callable[[Any, Any], str | None] = lambda first, second: None,
    ):
        super().__init__(lease_seconds, max_tries)
        self._environment_seconds = environment_seconds
        self.counts, self.newest, self.served = TaskCounts(), version, frozenset(served)
        self._rule, self._exact, self._oldest, self._differs = rule, exact, version, differs
        self.complete: dict[Key, GroupTask] = {}  # groups that were not taken
        self._results: list[tuple[NodeTask, Any]] = []
        self._done: set[Key] = set()  # nodes with a result, of groups that are not forgotten
        self.differing: list[tuple[Key, int, str]] = []

    # -- the trainer's side -----------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Notes weights that workers can get, newer than all before."""
        if version < self.newest:
            raise ValueError(f"version {version} is older than {self.newest}, which is published")
        self.newest = version

    def begin(self, task: OpenTask) -> None:
        """Takes a task that may begin."""
        if task.key in self.open or task.key in self._done:
            raise ValueError(f"{task.key[1]!r} of prompt {task.key[0]} has begun already")
        self.open.add(task)

    def begin_group(self, task: GroupTask, pieces: Mapping[int, Piece]) -> None:
        """As `begin`; `pieces`: what an earlier run knew of its responses."""
        known = [piece.lowest for piece in pieces.values() if piece.tokens]
        task.floor = min([self._bounds(task)[0], *known])
        task.ended = {s: p for s, p in pieces.items() if p.whole}
        task.under_way = {s: p for s, p in pieces.items() if not p.whole and p.tokens}
        self.begin(task)
        self._end_if_complete(task)

    def version_of(self, step: int) -> int:
        """The version that answers a step with exact versions, otherwise the oldest that may."""
        return max(self._oldest if self._exact else 0, self._rule.exact_version(step))

    def take(self) -> list[GroupTask]:
        """Groups that are complete and were not taken."""
        taken, self.complete = self.complete, {}
        return list(taken.values())

    def take_results(self) -> list[tuple[NodeTask, Any]]:
        """Nodes whose results are there and were not taken, with these."""
        taken, self._results = self._results, []
        return taken

    def groups(self) -> list[GroupTask]:
        """Groups that were not taken, but for those of evaluations."""
        return [*self.complete.values(), *self._trained()]

    @property
    def has_news(self) -> bool:
        """Whether something was not taken."""
        return bool(self.complete or self._results or self.given_up)

    def forget(self, counters: Collection[int]) -> None:
        """Forgets groups that nobody waits for any more."""
        super().forget(counters)
        gone = set(counters)
        self.complete = {key: task for key, task in self.complete.items() if key[0] not in gone}
        self._done = {key for key in self._done if key[0] not in gone}
        self._results = [found for found in self._results if found[0].key[0] not in gone]

    @property
    def starving(self) -> bool:
        """Whether a worker that holds the newest weights has nothing to sample, and no group waits
        for one."""
        return self.newest in self.idle.values() and not self.open.num_waiting.get(SAMPLING)

    def unserved(self) -> list[str]:
        """Nodes that tasks wait for and no worker at work serves."""
        return [node for node in self.open.nodes if not any(self.others("", node))]

    def num_open(self, node: str) -> int:
        """Open tasks of a node, or of SAMPLING."""
        return len(self.open.of_node(node))

    # -- the workers' side ------------------------------------------------------------------------

    def lease(
        self,
        worker: str,
        held: int,
        capacity: int,
        now: float,
        slots: int = 0,
        *,
        idle: bool = False,
    ) -> list[GroupTask]:
        """Leases groups to a worker that holds a version, until there is no capacity for a
        response; `idle`: nothing is under way there, and no task buffer had anything for it.

        Further ones wait for the next question where they are too large for one answer, or where
        the worker holds enough by the number of its slots; 0: by its capacity.
        """
        self.heartbeat(worker, now)
        self.idle.pop(worker, None)
        if idle:
            self.idle[worker] = held
        stalled = worker in self.stalled
        most = 1 if stalled else QUOTA * slots if slots else capacity
        capacity = min(capacity, most - sum(task.lacks for task in self.open.held(worker)))
        if capacity <= 0:
            return []
        queues = [one for one in self.open.queues() if self._may(worker, held, *one)]
        leased: list[GroupTask] = []
        size = 0
        last = self.comes_last(worker)
        for task in self.waiting(worker, queues, backwards=last):
            size += task.size + sum(piece.size for piece in task.sent().values())
            if capacity <= 0 or (leased and size > ANSWER_BYTES):
                break
            capacity -= task.lacks
            leased.append(task)
        for task in leased:
            self.open.lease(task, worker, now, self.seconds, self._environment_seconds)
            self.idle.pop(worker, None)
        return leased

    def lease_node(self, worker: str, nodes: Collection[str], now: float) -> NodeTask | None:
        """Leases a task of one of its nodes to a worker, that of the lowest counter; none to one
        that holds enough."""
        self.heartbeat(worker, now, nodes)
        stalled = worker in self.stalled
        holds = sum(task.node in nodes for task in self.open.held(worker))
        if holds >= (1 if stalled else NODE_QUOTA):
            return None
        last = self.comes_last(worker, nodes)
        found = [
            next(self.waiting(worker, self.open.queues([node]), backwards=last), None)
            for node in nodes
            if node not in SAMPLER
        ]
        task = (max if last else min)(filter(None, found), key=lambda t: t.key, default=None)
        if task is None:
            return None
        self.open.lease(task, worker, now, self.seconds)
        return task

    def wanted(self) -> list[int]:
        """Versions that an idle worker should hold, the most urgent first; never empty."""
        if not self._exact:
            return [self.newest]
        versions = sorted({self.version_of(step) for _, step in self.open.queues([SAMPLING])})
        return [v for v in versions if v <= self.newest] or [self.newest]

    def submit(
        self,
        worker: str,
        key: Key,
        pieces: Mapping[int, Piece],
        now: float,
        *,
        goes_on: bool = True,
    ) -> list[int]:
        """Takes what a worker knows of a group's responses; returns the samples that have ended by
        it.

        Responses that have ended may be left out once they are known here. With `goes_on` the
        worker would work on: that prolongs its lease, and a worker whose lease has ended gets it
        back if it submits something and nobody else has it. Otherwise the group is for others.
        Whether the worker has it afterwards: see `holds`.
        """
        self.heartbeat(worker, now)
        task = self.find(GroupTask, key)
        if task is None:
            if any(piece.tokens for piece in pieces.values()):
                self.stalled.discard(worker)
            return []
        before, known = set(task.ended), task.tokens
        shown = sum(piece.tokens for piece in {**task.ended, **pieces}.values())
        for sample, piece in pieces.items():
            self._learn(task, sample, dataclasses.replace(piece, worker=worker))
        self.open.moved(task)
        new = [sample for sample in task.ended if sample not in before]
        has = task.worker == worker
        lost = not task.worker and worker in task.silent
        if new or ((has or lost) and shown > task.shown):
            self.stalled.discard(worker)
            task.shown, task.moved = max(shown, task.shown), now
        self.unfit = self.unfit and not (new or task.tokens > known)
        if self._end_if_complete(task):
            return new
        if goes_on and (has or (lost and worker not in self.stalled)):
            self.open.lease(task, worker, now, self.seconds, self._environment_seconds)
        elif has:
            self.open.free(task)
        return new

    def end(self, worker: str, why: str, now: float) -> None:
        """Ends a worker: nothing that it submitted for groups which are open counts."""
        super().end(worker, why, now)
        for task in self.of(GroupTask):
            task.drop(worker)
            self.open.moved(task)

    def holds(self, worker: str, key: Key) -> bool:
        """Whether a worker has the lease of a task."""
        return key in self.open and self.open[key].worker == worker

    def submit_node(self, worker: str, key: Key, result: Any) -> bool:
        """Takes the result of a node from a worker; whether it counts."""
        task = self.find(NodeTask, key)
        self.stalled.discard(worker)
        if task is None:
            self.counts.second += key in self._done
            return False
        self.open.remove(key)
        self._done.add(key)
        self._results.append((task, result))
        return True

    # -- one group --------------------------------------------------------------------------------

    def _trained(self) -> list[GroupTask]:
        """Open groups that a step trains."""
        return [task for task in self.of(GroupTask) if task.trains]

    def _bounds(self, task: GroupTask) -> tuple[int, int]:
        """The oldest and the newest version that may answer a group."""
        if not task.trains:
            return task.step, task.step
        oldest = self.version_of(task.step)
        return oldest, oldest if self._exact else self.newest

    def _may(self, worker: str, held: int, node: str, step: int) -> bool:
        """Whether a worker may answer groups of a step by the version that it holds, or of an
        evaluation of it."""
        if node != SAMPLING:
            return held == step == self.evaluates(worker)
        version = self.version_of(step)
        return held <= self.newest and (held == version if self._exact else held >= version)

    def _learn(self, task: GroupTask, sample: int, piece: Piece) -> None:
        if sample not in task.samples:
            return
        if sample in task.ended:
            if piece.whole:
                self.counts.second += 1
                self._compare(task, sample, piece)
            return
        newest = self._bounds(task)[1]
        if piece.tokens and not (task.floor <= piece.lowest and piece.highest <= newest):
            return  # by weights that may not answer the group
        if piece.whole:
            task.ended[sample] = piece
            task.under_way.pop(sample, None)
            task.workers.add(piece.worker)
        elif not self._exact:
            known = task.under_way.get(sample)
            if piece.tokens > (known.tokens if known else 0):
                task.under_way[sample] = piece
                task.workers.add(piece.worker)

    def _compare(self, task: GroupTask, sample: int, piece: Piece) -> None:
        """Notes where a second result differs from the first, with exact versions."""
        if not self._exact:
            return
        where = self._differs(task.ended[sample].content, piece.content)
        if where is not None:
            self.counts.differing += 1
            if sample not in task.differed:
                task.differed.add(sample)
                self.differing.append((task.key, sample, where))

    def _end_if_complete(self, task: GroupTask) -> bool:
        if task.complete and task.trains:
            self.open.remove(task.key)
            self.complete[task.key] = task
        elif task.complete:
            self.end_evaluation(task)
        return task.complete
