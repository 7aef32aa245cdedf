"""Links of this process's worker to its task buffer: in the training thread, or beside it.

A worker beside the training has devices that no trainer uses, and runs only programs of this
process's sampler; programs that span processes stay with the main thread. Its weights arrive
through host memory.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.environments.episode_sampler import EpisodeSampler, Progress
from distflow_jax.resharding.weight_sync import WeightSync, num_bytes
from distflow_jax.rollout.requests import Response
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.stream.exact_order import ExactOrder
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.sample_requests import HERE
from distflow_jax.stream.sampling_side import Hooks, SamplingSide, SamplingThread
from distflow_jax.stream.schedule import weight_buffers
from distflow_jax.stream.tasks import Key
from distflow_jax.stream.worker import Worker

IDLE_SECONDS = 0.05  # between two looks at what other threads have done


class LocalLink(SamplingSide):
    """The link (worker.Link) of a worker to the task buffer of its own process."""

    def __init__(
        self, config: StreamConfig, sampler: EpisodeSampler, producer: Producer, sync: WeightSync
    ):
        """`sync`: brings the trainer's weights to the sampler."""
        self._config, self._sampler, self._sync = config, sampler, sync
        self._producer, self._lock = producer, producer.lock

    def start(self, hooks: Hooks) -> None:
        """As SamplingSide.start."""
        self._hooks = hooks
        self._worker = Worker(self._sampler, self, cache=self._config.cache, span=hooks.span)

    def lease(self, worker: Worker, up_to: int | None = None) -> bool:
        """Begins groups that may begin, and leases all that the worker's version may answer;
        `up_to`: none of later steps. Whether there were any."""
        self._producer.admit(up_to)
        requests, leased = self._producer.requests, []
        with self._lock:
            while tasks := requests.lease(HERE, worker.version, sys.maxsize):
                leased += tasks
        worker.take((t.key, t.content, t.progress) for t in leased)
        if self._producer.buffer.complete:  # all of whose responses an earlier run has sampled
            self._hooks.hand_on()
        return bool(leased)

    def submit(self, worker: Worker, ended: Mapping[Key, Progress]) -> None:
        """Takes groups that are complete, and hands them on."""
        self._submit(ended, goes_on=False)
        self._hooks.hand_on()

    def fail(self, key: Key, why: str) -> None:
        """Raises: no other worker would answer it."""
        raise ValueError(why)

    def report(self) -> None:
        """Tells the buffer what is under way, as a checkpoint needs it."""
        self._submit(self._worker.progress(), goes_on=True)

    def _submit(self, found: Mapping[Key, Progress], *, goes_on: bool) -> None:
        counts, requests = self._worker.sampler.counts, self._producer.requests
        with self._lock:
            requests.submit_here(found, counts.under_way, counts.occupancy, goes_on=goes_on)

    @contextlib.contextmanager
    def suspended(self, version: int) -> Iterator[list[SamplerState]]:
        """See SamplingSide."""
        with self.hold(version), self._worker.suspended() as held:
            yield held


class InlineLink(LocalLink):
    """A worker on the trainer's devices, in the training thread, while training waits.

    It has no exact order: weight updates at boundaries need devices of their own (checks.py).
    """

    def advance(self, worker: Worker) -> bool:
        """Leases what may begin."""
        return self.lease(worker)

    def round(self) -> bool:
        """A decode call of the worker."""
        if worked := self._worker.round():
            return worked
        with self._lock:
            self._hooks.idle()
        return False

    def bring(self, params: Any, version: int) -> int:
        """Gives the worker the trainer's weights; returns their bytes."""
        self._worker.sampler.free_weights()
        weights = jax.block_until_ready(self._sync(params))
        self._worker.load(weights, version)
        with self._lock:
            self._producer.buffer.publish(version)
        return num_bytes(weights)

    def rest(self) -> None:
        """Waits for the decode call in flight."""
        self._worker.sampler.drain()

    @contextlib.contextmanager
    def hold(self, version: int) -> Iterator[None]:
        """Only this thread samples."""
        self.report()
        yield

    def close(self) -> None:
        """Drops what is under way."""
        self._worker.sampler.close()


class _Closing(Exception):
    """The thread ends during an evaluation."""


class ThreadLink(LocalLink):
    """A worker in a separate thread, until it is closed. It loads the newest weights at once."""

    def start(self, hooks: Hooks) -> None:
        """As SamplingSide.start."""
        super().start(hooks)
        self._inbox: dict[int, Any] = {}  # weights that have left, by version; under the lock
        self._arriving = False
        self._wanted: int | None = None  # version at which somebody wants the worker
        self._told = 0  # deliveries and wishes so far; under the lock
        self._held = self._closing = False  # whether it waits for `hold` to end; to be closed
        self._thread = SamplingThread("sampler", self._serve)
        self.raise_error = self._thread.raise_error

    def bring(self, params: Any, version: int) -> int:
        """Sends the trainer's weights on their way; returns their bytes."""
        self.make_room()
        left = self._sync.leave(params)
        self.deliver(left, version)
        return left.nbytes

    def make_room(self) -> None:
        """Waits until weights may leave: those that no worker takes any more are dropped."""
        buffers = weight_buffers(self._config)
        with self._lock:
            for version in [v for v in self._inbox if not self._needs(v)]:
                del self._inbox[version]
            while len(self._inbox) + self._arriving >= buffers:
                self.raise_error()
                self._lock.wait(IDLE_SECONDS)

    def deliver(self, left: Any, version: int) -> None:
        """Hands over weights on their way."""
        with self._lock:
            self._inbox[version] = left
            self._producer.buffer.publish(version)
            self._told += 1
            self._lock.notify_all()

    @contextlib.contextmanager
    def hold(self, version: int) -> Iterator[None]:
        """A block in which the thread waits and the worker holds the weights of a version.

        They must have been delivered, or be held already.
        """
        with self._lock:
            self._wanted = version
            self._told += 1
            self._lock.notify_all()
            while not self._held:
                self.raise_error()
                self._lock.wait(IDLE_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                self._wanted, self._held = None, False
                self._lock.notify_all()

    def close(self) -> None:
        """Ends the thread after the decode call that runs, and in an evaluation when a response has
        ended. If it does not end in time, the sampler is still the thread's."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if self._thread.join():
            self._worker.sampler.close()

    # -- in the thread ----------------------------------------------------------------------------

    def advance(self, worker: Worker) -> bool:
        """Takes the newest weights; with something to sample it goes on while they are on their
        way."""
        with self._lock:
            newest = max(self._inbox, default=None)
            takes = newest is not None and (not worker.sampler.busy or self._inbox[newest].ready)
            left = self._pop_inbox(newest) if takes else None
        if left is not None:
            self._load(worker, left, newest)
        worked = self.lease(worker) or left is not None
        if not (worked or worker.sampler.busy):
            with self._lock:
                if not self._inbox:
                    self._hooks.idle()
        return worked

    def _needs(self, version: int) -> bool:
        """Whether weights that wait have still to be taken once newer ones come; under the lock."""
        return False

    def _serve(self) -> None:
        with contextlib.suppress(_Closing):
            while not self._closing:
                told, wanted = self._told, self._wanted
                if wanted is not None and self._worker.version >= wanted:
                    self._wait_held()
                elif not self._worker.round():
                    with self._lock:
                        if told == self._told:
                            self._lock.wait(IDLE_SECONDS)

    def _pop_inbox(self, version: int) -> Any:
        """Takes weights out of the inbox, and drops older ones; under the lock."""
        left = self._inbox[version]
        for older in [v for v in self._inbox if v <= version]:
            del self._inbox[older]
        self._arriving = True
        return left

    def _load(self, worker: Worker, left: Any, version: int) -> None:
        """Loads weights that are on their way, in place of those that are held."""
        worker.sampler.free_weights()
        with self._hooks.arriving():
            worker.load(jax.block_until_ready(self._sync.arrive(left)), version)
        with self._lock:
            self._arriving = False
            self._lock.notify_all()

    def _wait_held(self) -> None:
        self.report()
        with self._lock:
            self._held = True
            self._lock.notify_all()
            while self._held and not self._closing:
                self._lock.wait(IDLE_SECONDS)


class OrderedLink(ThreadLink):
    """A worker in a separate thread that samples each step with exactly one version of the weights.

    Results do not depend on timing. Weights that `hold` wants are the only ones.
    """

    def start(self, hooks: Hooks) -> None:
        """As SamplingSide.start."""
        self._order = ExactOrder(
            self._producer.admission,
            held=self._producer.version,
            known=hooks.known,
            due=hooks.evaluations.due,
        )
        super().start(hooks)

    def evaluated_by(self, step: int) -> int:
        """Evaluations that come before the groups of this step, so that no line of the metrics
        depends on time."""
        return step - 1 - self._producer.admission.rule.max_staleness

    def end_with(self, version: int) -> None:
        """Begins nothing that needs newer weights: the run ends."""
        with self._lock:
            self._order.end_with(version)

    # -- in the thread ----------------------------------------------------------------------------

    def advance(self, worker: Worker) -> bool:
        """Begins what comes next, once the present step's groups have ended."""
        if worker.sampler.busy:
            return False
        with self._lock:
            newest = max(self._inbox, default=worker.version)
            work = self._order.next(newest)
            left = None  # taken now: `make_room` drops what nobody needs any more
            if work is not None and worker.version < work.version:
                left = self._pop_inbox(work.version)
        if work is None:
            return False
        if left is not None:
            self._load(worker, left, work.version)
        if work.step is not None:
            self.lease(worker, up_to=work.step)
        else:
            self._hooks.evaluations.make(worker.sampler, self._heard)
            with self._lock:
                self._lock.notify_all()
        return True

    def _needs(self, version: int) -> bool:
        return self._order.needs(version)

    def _heard(self, response: Response) -> None:
        """Hears of a response of an evaluation."""
        if self._closing:
            raise _Closing


def make_local_link(
    config: StreamConfig,
    sampler: EpisodeSampler,
    producer: Producer,
    sync: WeightSync,
    *,
    own_devices: bool,
) -> LocalLink:
    """The link of a run whose own processes sample; `own_devices`: that no trainer uses."""
    kind = {"in_flight": ThreadLink, "boundary": OrderedLink}[config.weight_update]
    return (kind if own_devices else InlineLink)(config, sampler, producer, sync)
