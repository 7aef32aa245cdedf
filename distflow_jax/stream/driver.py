"""Sampling for one process: in a separate thread, by workers, or while its training waits."""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.stream.evaluations import NOTHING_EVALUATED, Evaluations, Evaluator
from distflow_jax.stream.host_nodes import NodesAhead, Span
from distflow_jax.stream.host_thread import HostThread
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.resume import SampleSaver
from distflow_jax.stream.sampling_side import Hooks, SamplingSide
from distflow_jax.stream.weight_update_times import WeightUpdateTimes
from distflow_jax.watchdog.gossip import OTHERS

IDLE_SECONDS = 0.01  # between two looks at what other threads have done
ALL = sys.maxsize  # above every counter
NOTE_SECONDS = 0.5  # between two words to the watchdog on what the training waits for


def _span(name: str, **labels: Any) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class TrainerCalls:
    """Calls from a source to the training loop, and instruments that observe both."""

    span: Span = _span  # times a block under a name, in any thread
    note: Callable[[str], None] = lambda text: None  # what the running phase waits for; any thread
    phase: Callable[..., contextlib.AbstractContextManager] = _span  # of the training, by its name
    # a block with the weights that samplers take, on their devices
    weights: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    lend: Callable[[SamplerState], None] = lambda state: None  # the sampler's arrays
    give_back: Callable[[], SamplerState | None] = lambda: None
    keeps_weights: Callable[[int], bool] = lambda step: False  # whether samplers do, for now
    evaluator: Evaluator = NOTHING_EVALUATED  # of versions that samplers evaluate beside it


class Driver:
    """Samples the groups of a process, and passes them to the nodes that run on each group.

    Attributes:
      evaluations: evaluations made by samplers.
      times: of weight updates.
    """

    def __init__(
        self,
        producer: Producer,
        nodes: NodesAhead,
        sampling: SamplingSide,
        trainer: TrainerCalls,
        saver: SampleSaver,
        *,
        idle: Callable[[], None],
        known: Callable[[int], bool],
    ):
        """`sampling` begins here. `idle()`: the sampler has nothing to do; `known(counter)`: with
        weight updates at boundaries, whether all processes know the filter decisions of all groups
        below."""
        self._producer, self._lock = producer, producer.lock
        self._trainer, self._saver, self._sampling = trainer, saver, sampling
        self._host = HostThread(nodes, trainer.span, self._lock, producer.buffer)
        self.times = WeightUpdateTimes()
        self.evaluations = Evaluations(trainer.evaluator, self._host.call, held=producer.version)
        span = functools.partial(trainer.span, producer.name)
        sampling.start(Hooks(self.hand_on, self._arriving, span, idle, self.evaluations, known))

    def wait_until(self, until: Callable[[], bool], *, needs: int = 0, waits_for: str = "") -> None:
        """Waits until something is true, and samples meanwhile if this thread does.

        `needs`: the counter below which groups are needed for it.

        Raises what a sampler or a node that ran ahead has raised for one of these groups.
        `waits_for`: what it is, for the watchdog; "": the oldest of them.
        """
        next_note = 0.0  # when the watchdog is told again what the training waits for
        while not until():
            if needs:
                self._raise_errors(needs)
            if time.monotonic() >= next_note:
                self._trainer.note(waits_for or self._missing(needs))
                next_note = time.monotonic() + NOTE_SECONDS
            if not self._sampling.round():
                with self._lock:
                    self._lock.wait(IDLE_SECONDS)

    def hand_on(self) -> None:
        """Hands complete groups on; a checkpoint may have waited for one that is given up alone."""
        for group in self._producer.collect():
            self._host.submit(group, self._saver.add_complete)
        self._saver.add_complete()

    @contextlib.contextmanager
    def _arriving(self) -> Iterator[None]:
        """A block in which the sampler does not decode, since weights come."""
        with self.times.block("arrive"), self._trainer.span("take_weights"):
            yield

    def close(self) -> None:
        """Ends the threads."""
        self._sampling.close()
        self._host.close()

    def _raise_errors(self, needs: int) -> None:
        """Raises what a sampler or a disk has raised, or a node that ran on a group below a
        counter."""
        self._saver.check()
        self._sampling.raise_error()
        with self._lock:
            groups = [g for c, g in self._producer.groups.items() if c < needs]
        for running in [g.running for g in groups if g.running is not None]:
            if running.done():
                running.result()

    def _missing(self, needs: int) -> str:
        """The oldest group below a counter that is not done, and the node that it waits for."""
        if not needs:
            return OTHERS
        with self._lock:
            groups = [g for c, g in self._producer.groups.items() if c < needs and not g.done]
            begun = self._producer.begun_up_to(needs)
        oldest = min(groups, key=lambda group: group.counter, default=None)
        if oldest is None:
            return OTHERS if begun else f"{self._producer.name} has not begun"
        if oldest.sampling:
            return f"{min(oldest.sampling)} of prompt {oldest.counter}"
        return self._host.waits_for(oldest)
