"""The sampling side of a run whose workers are in other jobs: a thread that monitors leases.

The thread begins groups by the rule, passes complete groups and evaluations on, ends expired
leases, and logs missing workers.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from distflow_jax.cluster import processes
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.sampling_side import Hooks, SamplingSide, SamplingThread
from distflow_jax.stream.tasks import ENVIRONMENT, EVALUATION, SAMPLING

IDLE_SECONDS = 0.05  # between two looks at leases
TELL_SECONDS = 60.0  # between two words on a missing worker
LEAVING_SECONDS = 5.0  # that a run which is told to end waits for one
FIRST_SECONDS = 10.0  # before the first one


@dataclasses.dataclass(frozen=True)
class WorkerServer:
    """The server that workers call."""

    # Leases.moves, how many workers are at work, and the time
    moved: Callable[[Sequence[tuple[str, str, int, float]], int, float], None]
    # seconds without a worker, for so many groups, of a node of workers (""), prompts missing too
    missing: Callable[[float, int, str, bool], None]
    answer_waiting: Callable[[float], None]  # questions that wait, at a time; under the lock
    leave: Callable[[], None]  # closes it, at the end


class WorkersSide(SamplingSide):
    """Serves workers of other jobs, and monitors their leases, until it is closed."""

    def __init__(
        self,
        producer: Producer,
        store: Callable[[Any, int, Collection[int]], int],
        *,
        open_evaluations: int,
        no_workers_seconds: float,
        server: WorkerServer,
    ):
        """`store(params, version, evaluated)`: copies weights to where workers get them, and keeps
        versions that are evaluated, at most `open_evaluations`; returns the bytes of the weights.
        """
        self._producer, self._store, self._server = producer, store, server
        self._lock, self._buffer = producer.lock, producer.buffer
        self._open_evaluations, self._no_workers_seconds = open_evaluations, no_workers_seconds
        self._alone_since = self._served = time.monotonic()
        self._next_told = self._alone_since + FIRST_SECONDS
        self._at_work = threading.Lock()
        self._closing = False

    def start(self, hooks: Hooks) -> None:
        """As SamplingSide.start."""
        self._hooks, self._evaluations = hooks, hooks.evaluations
        with self._lock:
            self._begin_evaluation(self._producer.version)
        self._thread = SamplingThread("leases", self._serve)
        self.raise_error = self._thread.raise_error

    @property
    def missing_workers(self) -> list[str]:
        """Nodes that groups wait for, once a worker was missing for `no_workers_seconds`, or errors
        ended those that came."""
        if time.monotonic() - self._alone_since < self._no_workers_seconds:
            return []
        with self._lock:
            return self._unserved()

    def status(self) -> str:
        """As SamplingSide.status."""
        with self._lock:
            heard = [self._buffer.workers[name] for name in self._buffer.at_work()]
        if not heard:
            return "no worker is at work"
        return (
            f"workers at work: {len(heard)}, last heard {time.monotonic() - max(heard):.0f} s ago"
        )

    def stop_waiting(self) -> None:
        """As SamplingSide.stop_waiting."""
        self._no_workers_seconds = min(self._no_workers_seconds, LEAVING_SECONDS)
        with self._lock:
            self._lock.notify_all()

    def bring(self, params: Any, version: int) -> int:
        """As SamplingSide.bring; the weights are copied before it returns."""
        size = self._store(params, version, self._evaluations.open(version))
        with self._lock:
            self._buffer.publish(version)
            self._begin_evaluation(version)
            self._lock.notify_all()
        return size

    def evaluated_by(self, step: int) -> int:
        """All evaluations of weights that a later step was trained with, as far as they have ended
        everywhere; others, to be waited for, only where more are under way than hosts keep weights
        for."""
        if not (unrecorded := self._evaluations.open(step)):
            return step - 2
        missing = self._evaluations.missing(step - 2)
        first = processes.all_gather_ints(np.int64(min(missing, default=step - 1)))
        return max([int(first.min()) - 1, *unrecorded[: -self._open_evaluations]])

    @contextlib.contextmanager
    def hold(self, version: int) -> Iterator[None]:
        """A block in which no group begins or is handed on."""
        with self._at_work:
            yield

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join()
        self._server.leave()

    # -- in the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            with self._at_work:
                self._producer.admit()
                with self._lock:
                    self._buffer.expire(now := time.monotonic())
                    self._server.answer_waiting(now)
                    news = self._producer.requests.has_news
                    self._tell()
                    evaluated = self._buffer.take_evaluations()
                    moves, at_work = list(self._buffer.moves), len(self._buffer.joined)
                    self._buffer.moves.clear()
                for version, tasks in evaluated.items():
                    self._evaluations.answered(version, tasks)
                self._server.moved(moves, at_work, now)
                if news:
                    self._hooks.hand_on()
            self._look_for_workers()
            with self._lock:
                if not self._producer.requests.has_news and not self._closing:
                    self._lock.wait(IDLE_SECONDS)

    def _begin_evaluation(self, version: int) -> None:
        """Begins the evaluation of a version that workers can get, if it is due; under the lock."""
        if self._evaluations.due(version):
            self._producer.evaluate(version, self._evaluations.begin(version))

    def _tell(self) -> None:
        """Tells the others of starving workers, and of a round that has ended; under the lock."""
        self._hooks.idle()
        producer = self._producer
        if producer.begun_up_to(end := producer.admission.end(producer.version)):
            self._hooks.known(end)

    def _unserved(self) -> list[str]:
        """Nodes that groups wait for, and no worker at work runs; under the lock.

        Groups whose prompts are missing wait too: nobody is there who would put them.
        """
        buffer, producer = self._buffer, self._producer
        waiting = self._num_open() > 0 or producer.lacks_prompts
        sampling = [producer.name] if waiting and not buffer.at_work() else []
        needs_host = ENVIRONMENT in buffer.served and self._num_open() > 0
        hosts = [ENVIRONMENT] if needs_host and not buffer.at_work(ENVIRONMENT) else []
        return hosts + sampling + buffer.unserved()  # samplers stall for want of hosts

    def _num_open(self) -> int:
        """Groups that wait for samples, those of evaluations too."""
        return self._buffer.num_open(SAMPLING) + self._buffer.num_open(EVALUATION)

    def _look_for_workers(self) -> None:
        now = time.monotonic()
        with self._lock:
            missing = self._unserved()
            node = next((name for name in missing[:1] if name in self._buffer.served), "")
            groups = (self._buffer.num_open(node) if node else 0) or self._num_open()
            lacking, unfit = self._producer.lacks_prompts, self._buffer.unfit
        self._served = self._served if missing else now
        if not unfit and self._alone_since < self._served:
            self._alone_since, self._next_told = self._served, self._served + FIRST_SECONDS
        elif missing and now >= self._next_told:
            self._next_told = now + TELL_SECONDS
            self._server.missing(now - self._alone_since, groups, node, lacking)
