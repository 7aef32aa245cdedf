"""The thread that samples beside the training, on devices that only samplers have.

It issues programs of this process's sampler alone; programs that span processes stay with the main
thread. Weights come to it in the memory of the host, and it takes them between two decode calls.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.rollout.requests import Response
from distflow_jax.stream.evaluations import Evaluations
from distflow_jax.stream.exact_order import ExactOrder
from distflow_jax.stream.producer import Producer

IDLE_SECONDS = 0.05  # between two looks at what other threads have done
JOIN_SECONDS = 60.0  # for a decode call to end


class _Closing(Exception):
    """The thread ends amid an evaluation."""


class SamplingThread:
    """Samples by the rule until it is closed.

    With an `order` each step's groups are answered wholly by one version of the weights: results
    depend on no timing. Without, the newest weights are taken at once.
    """

    def __init__(
        self,
        producer: Producer,
        arrive: Callable[[Any], contextlib.AbstractContextManager[Any]],
        round: Callable[[], None],
        *,
        order: ExactOrder | None,
        evaluations: Evaluations | None,
        cache: str,
        buffers: int,
        idle: Callable[[], None] = lambda: None,
    ):
        """`arrive(left)`: a block with the weights on the sampler's devices, of those that have
        left the trainer. `round()`: a round of the sampler that hands its groups on. Both are
        called in the thread, which begins at once. `evaluations`: those that the order has.
        `buffers`: weights that have left and lie in the memory of the host at a time. `idle()` is
        called under the lock, without an order, where nothing is under way or may begin."""
        self._producer, self._arrive, self._order, self._cache = producer, arrive, order, cache
        self._evaluations, self._idle = evaluations, idle
        self._round_of_sampler, self._lock = round, producer.lock
        self._inbox: dict[int, Any] = {}  # weights that have left, by version; under the lock
        self._buffers, self._arriving = buffers, False
        self._wanted: int | None = None  # version at which somebody wants the sampler
        self._told = 0  # deliveries and wishes so far; under the lock
        self.missing_workers: list[str] = []  # nodes that wait for a worker: never
        self._held = self._closing = False  # whether it waits for `hold` to end; to be closed
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        self._end = self._executor.submit(self._serve)

    def raise_error(self) -> None:
        """Raises what has ended the thread, if anything has."""
        if self._end.done():
            self._end.result()

    def bring(self, sync: WeightSync, params: Any, version: int) -> int:
        """Sends the trainer's weights to where the sampler takes them; returns their bytes."""
        self.make_room()
        left = sync.leave(params)
        self.deliver(left, version)
        return left.nbytes

    def make_room(self) -> None:
        """Waits until weights may leave: those that no sampler takes any more are dropped."""
        with self._lock:
            # without an order the newest are taken
            needs = self._order.needs if self._order else lambda version: False
            for version in [v for v in self._inbox if not needs(v)]:
                del self._inbox[version]
            while len(self._inbox) + self._arriving >= self._buffers:
                self.raise_error()
                self._lock.wait(IDLE_SECONDS)

    def deliver(self, left: Any, version: int) -> None:
        """Hands over weights on their way."""
        with self._lock:
            self._inbox[version] = left
            self._told += 1
            self._lock.notify_all()

    def round(self) -> bool:
        """Nothing: the thread samples."""
        return False

    def rest(self) -> None:
        """Nothing: the trainer shares no devices with it."""

    @contextlib.contextmanager
    def hold(self, version: int) -> Iterator[None]:
        """A block in which the thread waits and the sampler holds the weights of a version.

        They must have been delivered, or be held already. With an order these are the only ones.
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

    def end_with(self, version: int) -> None:
        """Begins nothing that needs newer weights: the run ends. With an order."""
        with self._lock:
            self._order.end_with(version)

    def close(self) -> bool:
        """Ends the thread after the decode call that runs, and in an evaluation when a response has
        ended; whether it has ended in time. If not, the sampler is still the thread's."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        wait([self._end], JOIN_SECONDS)
        self._executor.shutdown(wait=False)
        return self._end.done()

    # -- in the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        with contextlib.suppress(_Closing):
            self._serve_until_closing()

    def _serve_until_closing(self) -> None:
        while not self._closing:
            told, wanted = self._told, self._wanted
            if wanted is not None and self._producer.sampler.version >= wanted:
                self._wait_held()
                continue
            worked = self._work() if self._order is None else self._work_in_order()
            if not worked:
                with self._lock:
                    if told == self._told:
                        self._lock.wait(IDLE_SECONDS)

    def _work(self) -> bool:
        """A round with the newest weights; whether there was anything to do.

        With something to sample it goes on while weights are on their way.
        """
        with self._lock:
            newest = max(self._inbox, default=None)
            takes = newest is not None and self._takes(newest)
            left = self._leave(newest) if takes else None
        if left is not None:
            self._load(left, newest)
            return True
        self._producer.admit()
        if self._round():
            return True
        with self._lock:
            self._idle()
        return False

    def _takes(self, version: int) -> bool:
        """Whether weights that have left are taken now; under the lock."""
        return not self._producer.sampler.busy or self._inbox[version].ready

    def _work_in_order(self) -> bool:
        """A round of the present step's groups, or the beginning of what comes next."""
        if self._round():
            return True
        producer = self._producer
        with self._lock:
            newest = max(self._inbox, default=producer.sampler.version)
            work = self._order.next(newest)
            left = None  # taken now: `make_room` drops what nobody needs any more
            if work is not None and producer.sampler.version < work.version:
                left = self._leave(work.version)
        if work is None:
            return False
        if left is not None:
            self._load(left, work.version)
        if work.step is None:
            self._evaluations.make(producer.sampler, self._heard)
            with self._lock:
                self._lock.notify_all()
        else:
            producer.admit(up_to=work.step)
        return True

    def _heard(self, response: Response) -> None:
        """Hears of a response of an evaluation."""
        if self._closing:
            raise _Closing

    def _round(self) -> bool:
        if not self._producer.sampler.busy:
            return False
        self._round_of_sampler()
        return True

    def _leave(self, version: int) -> Any:
        """Takes weights out of the inbox, and drops older ones; under the lock."""
        left = self._inbox[version]
        for older in [v for v in self._inbox if v <= version]:
            del self._inbox[older]
        self._arriving = True
        return left

    def _load(self, left: Any, version: int) -> None:
        """Loads weights that are on their way, in place of those that are held."""
        sampler = self._producer.sampler
        sampler.free_weights()
        with self._arrive(left) as weights:
            sampler.load(weights, version, cache=self._cache)
        del left
        with self._lock:
            self._arriving = False
            self._lock.notify_all()

    def _wait_held(self) -> None:
        with self._lock:
            self._held = True
            self._lock.notify_all()
            while self._held and not self._closing:
                self._lock.wait(IDLE_SECONDS)
