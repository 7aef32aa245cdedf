"""Requests of workers that wait at a task buffer until there is an answer."""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future

from distflow_jax.stream.links.worker_pool import IDLE_QUESTIONS, LEAST_SECONDS

WAIT_SECONDS = 20.0  # for which a question waits at most
MOST_QUESTIONS = 4096  # that wait; those beyond are told when to ask again


@dataclasses.dataclass(frozen=True)
class _Question:
    worker: str
    nodes: Sequence[str]
    known: Hashable
    until: float
    answer: Future[bytes] = dataclasses.field(default_factory=Future)


class WaitingQuestions:
    """Requests for tasks of some nodes, in order of arrival. Reads no clock.

    A worker whose request waits counts as live although it is silent.
    """

    def __init__(self, waiting: Mapping[str, int], seconds: float, news: Hashable):
        """`waiting`: number of tasks by node that nobody holds. `seconds`: for which no worker may
        be silent. `news`: as of `answer`."""
        self._tasks, self._news = waiting, news
        self._seconds = min(WAIT_SECONDS, seconds)
        self._last = 0.0  # when the last worker that got nothing asks again
        self._waiting: collections.deque[_Question] = collections.deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether no further one may wait."""
        return len(self._waiting) >= MOST_QUESTIONS

    def add(self, worker: str, nodes: Sequence[str], known: Hashable, now: float) -> Future[bytes]:
        """The answer to come to a question of a worker, and what this one knows."""
        question = _Question(worker, nodes, known, now + self._seconds)
        self._waiting.append(question)
        return question.answer

    def seconds(self, now: float) -> float:
        """Seconds after which a worker asks again whose question does not wait: one after
        another."""
        after = max(now + LEAST_SECONDS, self._last + 1 / IDLE_QUESTIONS)
        self._last = min(after, now + self._seconds)
        return self._last - now

    def answer(
        self,
        now: float,
        news: Hashable,
        known: Callable[[str], Hashable],
        text: Callable[[str], bytes],
    ) -> None:
        """Answers those that have waited enough, by `text(worker)`: as many as there are tasks for
        them, and those that know something else than `known(worker)`, which changes with `news`
        alone."""
        changed, self._news = news != self._news, news
        tasks, skipped = sum(self._tasks.values()), []
        while self._waiting:
            question = self._waiting.popleft()
            waited = question.until <= now or (tasks > 0 and self.has_tasks(question.nodes))
            if waited or (changed and question.known != known(question.worker)):
                tasks -= 1
                if question.answer.set_running_or_notify_cancel():  # else its worker has gone
                    question.answer.set_result(text(question.worker))
                continue
            skipped.append(question)
            if tasks <= 0 and not changed:  # those behind it wait for longer
                break
        self._waiting.extendleft(reversed(skipped))

    def has_tasks(self, nodes: Sequence[str]) -> bool:
        """Whether nobody holds some task of these nodes."""
        return any(self._tasks.get(node) for node in nodes)
