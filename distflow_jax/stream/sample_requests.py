"""The requests of a process that workers answer, between its groups and its task buffer."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import Episode, without_lone
from distflow_jax.rollout.occupancy import Occupancy
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
        # of the worker of this process: tokens under way, and its slots
        self._here = 0, Occupancy()
        self._arrived: list[Response] = []
        self._handed: list[GroupTask] = []  # returned by `take_complete`, and not counted elsewhere
        self._elsewhere = Occupancy()  # of the workers of other jobs

    @property
    def busy(self) -> bool:
        """Whether a request was not returned by `take_complete`."""
        return bool(self.buffer.groups())

    @property
    def under_way(self) -> int:
        """Tokens of all requests, as far as this process knows, until `handed_on`."""
        tasks = [*self._handed, *self.buffer.groups()]
        known = [task.tokens for task in tasks if task.complete or task.worker != HERE]
        return sum(known) + self._here[0]

    @property
    def occupancy(self) -> Occupancy:
        """The slots of all workers."""
        return self._here[1].plus(self._elsewhere)

    def begin(self, key: Key, request: GroupRequest, progress: Progress, size: int = 0) -> None:
        """Adds a request, to go on with the `progress` of an earlier run; `size`: bytes of its
        prompt, where they are many."""
        task = GroupTask(
            key=key,
            content=request,
            step=request.turn,
            samples=request.samples,
            order=tuple(request.rank or ()),
            size=size,
        )
        with self.lock:
            self.buffer.begin_group(task, pieces_of(progress))

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
            complete = self._handed = self.buffer.take()
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
        self._handed = []

    @property
    def has_news(self) -> bool:
        """Whether `take_complete` has something to do."""
        return bool(self._arrived or self.buffer.has_news)

    def give_up(self) -> dict[int, str]:
        """Prompts that no worker can answer, with the reason; their requests are gone."""
        found, self.buffer.given_up = self.buffer.given_up, {}
        return found

    def progress(self) -> dict[Key, Progress]:
        """Samples of each request that `take_complete` has not returned."""
        return {task.key: task.progress for task in self.buffer.groups()}

    # -- the workers' side ------------------------------------------------------------------------

    def lease(
        self, worker: str, held: int, capacity: int, slots: int = 0, *, idle: bool = False
    ) -> list[GroupTask]:
        """Leases requests to a worker that holds a version, see TaskBuffer.lease."""
        return self.buffer.lease(worker, held, capacity, time.monotonic(), slots, idle=idle)

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
        spent: Occupancy,
        goes_on: bool,
    ) -> list[Key]:
        """Takes the samples of a worker; returns the keys that it should drop.

        `spent`: by its slots since it submitted something last; `goes_on`: whether it works on.
        """
        self._elsewhere = self._elsewhere.plus(spent)
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

    def submit_here(
        self, found: Mapping[Key, Progress], under_way: int, slots: Occupancy, *, goes_on: bool
    ) -> None:
        """Takes the samples of the worker of this process, with the tokens that it has under way,
        and what its slots did since the run began."""
        now = time.monotonic()
        for key, progress in found.items():
            self.buffer.submit(HERE, key, pieces_of(progress), now, goes_on=goes_on)
            if not goes_on and key in self.buffer.open:
                raise ValueError(f"samples of prompt {key[0]} by this process do not fit its rule")
        if goes_on:  # what is complete counts as such, though the worker has not returned it yet
            complete = {task.key for task in (*self._handed, *self.buffer.complete.values())}
            under_way -= sum(p.num_sampled for key, p in found.items() if key in complete)
        self._here = under_way, slots

    def _tell_differing(self, worker: str) -> None:
        """Warns of second results that differ, of a worker that has just submitted them."""
        found, self.buffer.differing = self.buffer.differing, []
        for (counter, _), sample, where in found:
            text = "response %d to prompt %d %s of %s does not; one version on every worker should "
            log.warning(text + "give one response", sample, counter, where, worker)


def differs(first: Episode, second: Episode) -> str | None:
    """Where two samples of one response differ, and how the first one goes on, which counts; None:
    they are equal up to a token whose choice was close."""
    one, two = first.response, second.response
    length = min(len(one.tokens), len(two.tokens))
    unlike = np.flatnonzero(one.tokens[:length] != two.tokens[:length])
    if not len(unlike) and len(one.tokens) == len(two.tokens):
        return None
    at = int(unlike[0]) if len(unlike) else length
    if len(unlike) and float(min(one.margin[at], two.margin[at])) < NEAR_TIE:
        return None
    mine, other = (
        f"token {x.tokens[at]}" if at < len(x.tokens) else "no token" for x in (one, two)
    )
    return f"differs at token {at}: {mine} counts, and {other}"
