"""Evaluations as tasks for a few workers, while the other workers sample groups for training.

One version of the weights answers an evaluation. A worker that takes part holds this version until
its responses have ended, then loads the newest again. At most one in SHARE of the active workers
takes part, and at least one, in the oldest incomplete evaluation.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence

from distflow_jax.stream.leases import Leases
from distflow_jax.stream.tasks import EVALUATION, SAMPLING, GroupTask, Key, OpenTask

SHARE = 4  # workers at work, for each one that evaluates


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


class EvaluationLeases(Leases):
    """Leases that track which workers evaluate."""

    def __init__(self, seconds: float, max_tries: int):
        """As of Leases."""
        super().__init__(seconds, max_tries)
        self.evaluating: tuple[int, frozenset[str]] = (-1, frozenset())  # a version, and by whom
        self.evaluated: dict[Key, GroupTask] = {}  # tasks that have ended and were not taken

    def evaluates(self, worker: str) -> int | None:
        """The version that a worker should hold to evaluate it; None: it takes no part."""
        version, workers = self.evaluating
        return version if worker in workers else None

    def take_evaluations(self) -> Mapping[int, Sequence[GroupTask]]:
        """The evaluations of which all tasks have ended, by version, and their tasks by counter."""
        if not self.evaluated:
            return {}
        left = {task.step for task in self._open_evaluations()}
        whole = [task for _, task in sorted(self.evaluated.items()) if task.step not in left]
        for task in whole:
            del self.evaluated[task.key]
        return {v: [t for t in whole if t.step == v] for v in sorted({t.step for t in whole})}

    def expire(self, now: float) -> Sequence[str]:
        """As of Leases; says anew which workers evaluate."""
        stalled, tasks = super().expire(now), self._open_evaluations()
        # a stalled one that is alone may take part: it has nothing else to show
        serve = self._serving.get(SAMPLING, {}).keys()
        self.evaluating = evaluators(tasks, self.at_work() or serve)
        return stalled

    def give_up(self, task: OpenTask, why: str) -> None:
        """As of Leases; an evaluation does without the prompt."""
        found = self.find(GroupTask, task.key)
        if found is None or found.trains:
            return super().give_up(task, why)
        found.lost = why
        self.end_evaluation(found)

    def end_evaluation(self, task: GroupTask) -> None:
        """Notes that a task has ended, as far as workers could answer it."""
        self.open.remove(task.key)
        self.evaluated[task.key] = task

    def _open_evaluations(self) -> Collection[GroupTask]:
        return self.open.of_node(EVALUATION)
