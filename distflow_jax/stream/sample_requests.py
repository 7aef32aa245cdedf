"""The requests of a process that workers answer, between its groups and its task buffer."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from distflow_jax.environments.episode_sampler import Counts, Progress
from distflow_jax.environments.episodes import Episode, without_lone
from distflow_jax.rollout.requests import GroupRequest, Response
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.tasks import EVALUATION, GroupTask, Key, pieces_of

HERE = "here"  # the worker of this process, whose sampler counts what is under way
NEAR_TIE = 1e-4  # lead of a token over the next one below which its choice may differ

log = logging.getLogger("distflow_jax")


class SampleRequests:
    """Requests from `begin` until `take_complete` returns them, whichever worker answers.

    All calls except `begin` and `take_complete` require the producer's lock.

    Attributes:
      buffer: of their tasks, and of nodes that workers run on groups whose samples are complete.
      here: counts of this process's worker since `take_complete` last returned; zeros: no such
        worker.
    """

    def __init__(
        self,
        buffer: TaskBuffer,
        lock: threading.Condition,
        on_response: Callable[[Response], None] | None = None,
    ):
        """`lock` guards the buffer; `on_response` is called as soon as a response of another job's
        worker is there, in the thread of `take_complete`."""
        self.buffer, self.lock, self._on_response = buffer, lock, on_response
        self.here = self._here = Counts()
        self._arrived: list[Response] = []
        self._restored = self._taken = self._handed = 0
        self._elsewhere = Counts().occupancy  # of the workers of other jobs

    @property
    def busy(self) -> bool:
        """Whether a request was not returned by `take_complete`."""
        return bool(self.buffer.groups())

    @property
    def counts(self) -> Counts:
        """Numbers of all that workers have sampled, as far as this process knows."""
        elsewhere = [task.tokens for task in self.buffer.groups() if task.worker != HERE]
        known = sum(elsewhere) + self._handed
        return Counts(
            self.here.tokens + self._taken + known - self._restored,
            self.here.under_way + known,
            self.here.occupancy.plus(self._elsewhere),
        )

    def begin(self, key: Key, request: GroupRequest, progress: Progress, size: int = 0) -> None:
        """Adds a request, to go on with the `progress` of an earlier run; `size`: bytes of its
        prompt, where they are many."""
        pieces = pieces_of(progress)
        order = tuple(request.rank or ())
        with self.lock:
            self._restored += sum(piece.tokens for piece in pieces.values())
            task = GroupTask(
                key=key,
                content=request,
                step=request.turn,
                samples=request.samples,
                order=order,
                size=size,
            )
            self.buffer.begin_group(task, pieces)

    def evaluate(self, version: int, request: GroupRequest, size: int) -> None:
        """Adds a request of an evaluation of a version; `size` as of `begin`. Under the lock.

        The buffer hands out what has ended: nothing trains on these tokens.
        """
        task = GroupTask(
            key=(request.prompt.counter, f"{EVALUATION} {version}"),
            content=request,
            node=EVALUATION,
            step=version,
            samples=request.samples,
            size=size,
        )
        self.buffer.begin_group(task, {})

    def take_complete(self) -> list[tuple[Key, list[Episode], set[str]]]:
        """Requests that are complete now, their responses in the order of their numbers, and the
        workers that have sampled these; call `handed_on` when they are counted elsewhere. Groups go
        on whose nodes have results."""
        with self.lock:
            results = self.buffer.take_results()
            arrived, self._arrived = self._arrived, []
            complete = self.buffer.take()
            elsewhere = sum(task.tokens for task in complete if task.worker != HERE)
            self._handed = elsewhere
        if self._on_response is not None:
            for response in arrived:
                self._on_response(response)
        for task, result in results:
            task.then(result)
        return [
            (
                task.key,
                without_lone([task.ended[s].content for s in sorted(task.ended)]),
                task.workers,
            )
            for task in complete
        ]

    def handed_on(self) -> None:
        """Notes that what `take_complete` has returned is counted elsewhere."""
        self._taken, self._handed, self.here = self._taken + self._handed, 0, self._here

    @property
    def has_news(self) -> bool:
        """Whether `take_complete` has something to do."""
        return bool(self._arrived or self.buffer.has_news)

    def give_up(self) -> dict[int, str]:
        """Prompts that no worker can answer, with the reason; their requests are gone."""
        found, self.buffer.given_up = self.buffer.given_up, {}
        return found

    def forget(self, tokens: int) -> None:
        """Takes tokens of a prompt that was given up out of the count: nothing trains on them."""
        self._taken -= tokens

    def progress(self) -> dict[Key, Progress]:
        """Samples of each request that `take_complete` has not returned."""
        return {task.key: task.progress for task in self.buffer.groups()}

    # -- the workers' side ------------------------------------------------------------------------

    def lease(
        self, worker: str, held: int, capacity: int, slots: int = 0, *, idle: bool = False
    ) -> list[GroupTask]:
        """Leases requests to a worker that holds a version, see TaskBuffer.lease."""
        leased = self.buffer.lease(worker, held, capacity, time.monotonic(), slots, idle=idle)
        if worker == HERE:  # its sampler counts them from now on
            self._restored -= sum(task.tokens for task in leased)
        return leased

    def requests(self, keys: Iterable[Key]) -> dict[Key, GroupRequest]:
        """The requests of some keys, without those that nobody waits for."""
        found = {key: self.buffer.find(GroupTask, key) for key in keys}
        return {key: task.content for key, task in found.items() if task is not None}

    def submit(
        self,
        worker: str,
        keys: Iterable[Key],
        found: Mapping[Key, Progress],
        *,
        spent: Counts,
        goes_on: bool,
    ) -> list[Key]:
        """Takes the samples of a worker; returns the keys that it should drop.

        `spent`: since it submitted something last; `goes_on`: whether it works on.
        """
        self._elsewhere = self._elsewhere.plus(spent.occupancy)
        now, dropped = time.monotonic(), []
        for key in keys:
            progress = found.get(key, Progress())
            task = self.buffer.find(GroupTask, key)
            new = self.buffer.submit(worker, key, pieces_of(progress), now, goes_on=goes_on)
            if task is not None and task.trains:
                self._arrived += [progress.episodes[sample].response for sample in new]
            if not self.buffer.holds(worker, key):
                dropped.append(key)
        self._tell_differing(worker)
        return dropped

    def submit_here(self, found: Mapping[Key, Progress], counts: Counts, *, goes_on: bool) -> None:
        """Takes the samples of the worker of this process, and its counts with them."""
        now = time.monotonic()
        for key, progress in found.items():
            self.buffer.submit(HERE, key, pieces_of(progress), now, goes_on=goes_on)
            if not goes_on and key in self.buffer.open:
                raise ValueError(f"samples of prompt {key[0]} by this process do not fit its rule")
        self._here = counts

    def _tell_differing(self, worker: str) -> None:
        """Warns of second results that differ, of a worker that has just submitted them."""
        found, self.buffer.differing = self.buffer.differing, []
        for (counter, _), sample, where in found:
            first, second = (f"token {t}" if t is not None else "no token" for t in where.tokens)
            log.warning(
                "response %d to prompt %d differs at token %d: %s counts, and %s of %s does not; "
                "one version on every worker should give one response",
                sample,
                counter,
                where.place,
                first,
                second,
                worker,
            )


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token in which two samples of one response differ; None: one has ended before."""

    place: int
    tokens: tuple[int | None, int | None]  # of the first result, which counts, and of the second


def differs(first: Episode, second: Episode) -> Difference | None:
    """Where two samples of one response differ, before a token whose choice was close."""
    one, two = first.response, second.response
    length = min(len(one.tokens), len(two.tokens))
    unlike = np.flatnonzero(one.tokens[:length] != two.tokens[:length])
    if not len(unlike) and len(one.tokens) == len(two.tokens):
        return None
    at = int(unlike[0]) if len(unlike) else length
    if len(unlike) and float(min(one.margin[at], two.margin[at])) < NEAR_TIE:
        return None
    tokens = [int(x.tokens[at]) if at < len(x.tokens) else None for x in (one, two)]
    return Difference(at, (tokens[0], tokens[1]))
