"""Asynchronous steps of one process: samplers run ahead, the training takes a step's groups.

The rule of lag_rule.py says which groups may begin and which of them a step takes; nothing else
decides, and no process asks another one. What processes tell each other is that they have their
groups of a step, and a region's verdicts, once for each step (parallel/background_gather.py).
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import EndOfData, joined
from distflow_jax.flow.flow_config import FlowConfig
from distflow_jax.flow.host_nodes import Group, NodesAhead, step_metrics
from distflow_jax.flow.lag_rule import Cut
from distflow_jax.flow.producer import Producer
from distflow_jax.flow.sampling_thread import SamplingThread
from distflow_jax.flow.swap_times import SwapTimes
from distflow_jax.layout import Metrics, Parts
from distflow_jax.parallel.background_gather import BackgroundGather
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.watchdog.gossip import OTHERS

IDLE_SECONDS = 0.01  # between two looks at what other threads have done
NOTE_SECONDS = 0.5  # between two words to the watchdog on what the training waits for
SWAPS = "weight_swap"  # in the place of a node's id


@dataclasses.dataclass(frozen=True)
class Observer:
    """Calls by which a flow is observed, from any thread."""

    span: Callable[[str], contextlib.AbstractContextManager]  # times a block under a name
    note: Callable[[str], None]  # tells the watchdog what the running phase waits for


class Flow:
    """The groups of a run on one process, from their prompts to the steps that train them.

    Call `publish` when the weights have changed, `take` for a step's groups, `finish` after it has
    trained. Samplers with devices of their own sample in a thread; on the trainer's devices this
    thread samples, while it waits in `take`.
    """

    def __init__(
        self,
        producer: Producer,
        nodes: NodesAhead,
        sync: WeightSync,
        gather: BackgroundGather,
        config: FlowConfig,
        *,
        own_devices: bool,
        observer: Observer,
    ):
        """`own_devices`: whether the sampler has devices that no trainer uses."""
        self.producer, self._nodes, self._config = producer, nodes, config
        self._sync, self._gather, self._observer = sync, gather, observer
        self._swaps = SwapTimes()
        self._lock = producer.lock
        self._told: set[int] = set()  # counters whose verdicts the others know
        self._template: FieldStore | None = None
        self._parts: dict[str, Parts] = {}  # without values: of all nodes that ran ahead
        self._version = producer.sampler.version  # the newest that was published
        # functions of the user are called from this one thread
        self._host = ThreadPoolExecutor(1, thread_name_prefix="host-nodes")
        self._at_work: Group | None = None  # the group whose nodes run now
        self._next_note = 0.0  # when the watchdog is told again what the training waits for
        self._thread: SamplingThread | None = None
        if own_devices:
            exact = producer.admission.rule.exact_version
            self._thread = SamplingThread(
                producer,
                self._arrive,
                self._round,
                exact=exact if config.swap == "boundary" else None,
                cache=config.cache,
                buffers=config.buffers,
            )

    def publish(self, params: Any, version: int) -> None:
        """Gives the sampler the trainer's weights after `version` steps. Collective."""
        if version == self._version:
            return
        self._version = version
        with self._swaps.block("leave"):
            if self._thread is not None:
                self._thread.make_room()
                self._thread.deliver(self._sync.leave(params), version)
                return
            sampler = self.producer.sampler
            sampler.drain()
            jax.tree.map(lambda x: x.delete(), sampler.params)  # the new ones take their place
            weights = jax.block_until_ready(self._sync(params))
            sampler.load(weights, version, cache=self._config.cache)

    def take(self, step: int) -> tuple[FieldStore, Metrics]:
        """The step's groups of this process, complete, once all processes have theirs. Collective.

        Raises EndOfData where the data have no group for the step, and what a sampler, an
        environment or a node that ran ahead has raised for a group of the step.
        """
        with self._swaps.block("wait"):
            return self._take(step)

    def _take(self, step: int) -> tuple[FieldStore, Metrics]:
        admission = self.producer.admission
        self._next_note = 0.0
        while True:
            with self._lock:
                cut = admission.cut(step)
            if cut.start == cut.end:
                raise EndOfData
            self._drive(lambda cut=cut: self._has(cut), needs=cut.end)
            told = self._gather.begin(self._news())
            told.add_done_callback(lambda _: self._wake())
            self._drive(told.done)
            with self._lock:
                for counter, keep in (news for theirs in told.result() for news in theirs):
                    admission.judge(counter, bool(keep))
                cut = admission.cut(step)
            if cut.final:
                if self._thread is None:  # the devices are the trainer's from here on
                    self.producer.sampler.drain()
                return self._joined(cut)

    def finish(self, step: int) -> int:
        """Ends a step that `take` has given; returns the first counter that it did not look at."""
        with self._lock:
            return self.producer.admission.finish(step).end

    def counts(self) -> Metrics:
        """Numbers of what was sampled since the last call."""
        counts = self.producer.sampler.take_counts()
        return {"perf/generate_calls": counts["generate_calls"]}

    @contextlib.contextmanager
    def suspended(self) -> Iterator[list[SamplerState]]:
        """A block in which the sampler is free for something else, such as an evaluation.

        It holds the weights that were published last. What is under way is suspended, and goes on
        afterwards; responses in turns end first. The block is given a list with the sampler's
        state, and leaves the state in it.
        """
        thread, sampler = self._thread, self.producer.sampler
        with contextlib.nullcontext() if thread is None else thread.hold(self._version):
            while sampler.in_turns and sampler.busy:
                self._round()
            state, partials = sampler.suspend()
            held = [state]
            yield held
            sampler.resume(held[0], partials)

    def close(self) -> SamplerState:
        """Drops what is under way; returns the sampler's state."""
        if self._thread is not None:
            self._thread.close()
        self._host.shutdown(wait=False, cancel_futures=True)
        self._gather.close()
        return self.producer.sampler.close()

    # -- waiting ----------------------------------------------------------------------------------

    def _drive(self, until: Callable[[], bool], *, needs: int = 0) -> None:
        """Samples until something is true, for which groups below a counter are needed."""
        producer = self.producer
        while not until():
            self._raise_errors(needs)
            if time.monotonic() >= self._next_note:
                self._observer.note(self._missing(needs))
                self._next_note = time.monotonic() + NOTE_SECONDS
            if self._thread is None:
                producer.admit()
                if producer.sampler.busy:
                    self._round()
                    continue
            with self._lock:
                self._lock.wait(IDLE_SECONDS)

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _round(self) -> None:
        with self._observer.span(self.producer.name):
            groups = self.producer.round()
        for group in groups:
            group.running = self._host.submit(self._run_nodes, group)

    def _run_nodes(self, group: Group) -> None:
        self._at_work = group
        try:
            self._nodes.run(group, self._observer.span)
        finally:
            self._at_work = None
        with self._lock:
            group.done = True
            self._lock.notify_all()

    @contextlib.contextmanager
    def _arrive(self, left: Any) -> Iterator[Any]:
        """A block in which the sampler does not decode, with the weights that have left."""
        with self._swaps.block("arrive"), self._observer.span("take_weights"):
            yield jax.block_until_ready(self._sync.arrive(left))

    def _raise_errors(self, needs: int) -> None:
        """Raises what a sampler has raised, or a node that ran on a group below a counter."""
        if not needs:
            return
        if self._thread is not None:
            self._thread.raise_error()
        with self._lock:
            groups = [g for c, g in self.producer.groups.items() if c < needs]
        for running in [g.running for g in groups if g.running is not None]:
            if running.done():
                running.result()

    def _missing(self, needs: int) -> str:
        """The oldest group below a counter that is not done, and the node that it waits for."""
        if not needs:
            return OTHERS
        with self._lock:
            groups = [g for c, g in self.producer.groups.items() if c < needs and not g.done]
        oldest = min(groups, key=lambda group: group.counter, default=None)
        if oldest is None:
            return f"{self.producer.name} has not begun"
        if oldest.sampling:
            return f"{min(oldest.sampling)} of prompt {oldest.counter}"
        late = self._at_work or oldest  # one group after the other
        return f"{late.node} of prompt {late.counter}"

    def _has(self, cut: Cut) -> bool:
        """Whether this process's groups of a cut have begun, and are done."""
        producer = self.producer
        with self._lock:
            groups = [g for c, g in producer.groups.items() if c < cut.end]
            return producer.begun_up_to(cut.end) and all(group.done for group in groups)

    def _news(self) -> list[tuple[int, bool]]:
        """Verdicts of this process that the others do not know."""
        if self._nodes.until is None:
            return []
        with self._lock:
            groups = [g for g in self.producer.groups.values() if g.done]
        news = [(g.counter, g.keep) for g in groups if g.counter not in self._told]
        self._told |= {counter for counter, _ in news}
        return news

    # -- a step -----------------------------------------------------------------------------------

    def _joined(self, cut: Cut) -> tuple[FieldStore, Metrics]:
        with self._lock:
            groups = self.producer.forget(range(cut.start, cut.end))
        self._told -= set(range(cut.start, cut.end))
        groups.sort(key=lambda group: group.counter)
        stores = [group.store for group in groups]
        if stores:
            self._template = stores[0]
        if self._template is None:
            raise ValueError(
                "a process has no group in the first step: raise data.prompts_per_step, or use "
                "fewer processes"
            )
        store = joined(stores or [self._template], np.array(cut.kept, np.int64))
        store.done = self._nodes.ids
        metrics = step_metrics(groups) | {SWAPS: self._swaps.take()}
        for name, value in metrics.items():
            if isinstance(value, Parts):
                self._parts[name] = dataclasses.replace(value, values=())
        return store, self._parts | metrics  # all processes merge the same
