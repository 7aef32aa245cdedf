"""Asynchronous steps of one process: samplers run ahead, the training takes a step's groups.

The rule of admission.py says which groups may begin and which of them a step takes; nothing else
decides, and no process asks another one. What processes tell each other is that they have their
groups of a step, and a region's verdicts, once for each step (parallel/background_gather.py).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import EndOfData, Until, joined
from distflow_jax.dag.plan import Unit
from distflow_jax.dag.plan_walker import Runner
from distflow_jax.flow.admission import Cut
from distflow_jax.flow.flow_config import FlowConfig
from distflow_jax.flow.host_nodes import Group, HostNodes, step_metrics
from distflow_jax.flow.producer import Producer
from distflow_jax.flow.sampler_thread import SamplerThread
from distflow_jax.layout import Metrics, Parts
from distflow_jax.parallel.background_gather import BackgroundGather
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.rollout.sampler import SamplerState

IDLE_SECONDS = 0.01  # between two looks at what other threads have done


class Flow:
    """The groups of a run on one process, from their prompts to the steps that train them.

    Call `publish` when the weights have changed, `take` for a step's groups, `finish` after it has
    trained. Samplers with devices of their own sample in a thread; on the trainer's devices this
    thread samples, while it waits in `take`.
    """

    def __init__(
        self,
        producer: Producer,
        sync: WeightSync,
        gather: BackgroundGather,
        units: Sequence[Unit],
        runners: Mapping[str, Runner],
        *,
        config: FlowConfig,
        own_devices: bool,
        until: Until | None,
        done: frozenset[str],
        span: Callable[[], contextlib.AbstractContextManager],
    ):
        """`units` run on each group. `until`: of a region. `done`: ids of all nodes that run ahead.
        `own_devices`: whether the sampler has devices that no trainer uses. `span()` times a round
        of the sampler, in any thread."""
        self._span = span
        self.producer, self._sync, self._gather = producer, sync, gather
        self._lock = producer.lock
        self._config, self._until, self._done = config, until, done
        self._error: BaseException | None = None
        self._told: set[int] = set()  # counters whose verdicts the others know
        self._template: FieldStore | None = None
        self._parts: dict[str, Parts] = {}  # without values: of all nodes that ran ahead
        self._version = producer.sampler.version  # the newest that was published
        self._host = HostNodes(units, runners, self._finished, self._failed)
        self._thread: SamplerThread | None = None
        if own_devices:
            exact = producer.admission.rule.exact_version
            self._thread = SamplerThread(
                producer,
                sync.arrive,
                exact=exact if config.swap == "boundary" else None,
                cache=config.cache,
                round=self._round,
                failed=self._failed,
            )
            self._thread.start()

    def publish(self, params: Any, version: int) -> None:
        """Gives the sampler the trainer's weights after `version` steps. Collective."""
        if version == self._version:
            return
        self._version = version
        if self._thread is not None:
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
        environment or a node that ran ahead has raised.
        """
        admission = self.producer.admission
        while True:
            with self._lock:
                cut = admission.cut(step)
            if cut.start == cut.end:
                raise EndOfData
            self._drive(lambda cut=cut: self._has(cut))
            told = self._gather.begin(self._news())
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

        It holds the weights that were published last. What is under way is put back, and goes on
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
        self._host.close()
        self._gather.close()
        return self.producer.sampler.close()

    # -- waiting ----------------------------------------------------------------------------------

    def _drive(self, until: Callable[[], bool]) -> None:
        """Samples until something is true."""
        producer = self.producer
        while not until():
            if self._error is not None:
                raise self._error
            if self._thread is None:
                producer.admit()
                if producer.sampler.busy:
                    self._round()
                    continue
            with self._lock:
                self._lock.wait(IDLE_SECONDS)

    def _round(self) -> None:
        with self._span():
            groups = self.producer.round()
        for group in groups:
            self._host.submit(group)

    def _has(self, cut: Cut) -> bool:
        """Whether this process's groups of a cut have begun, and are done."""
        producer = self.producer
        with self._lock:
            groups = [g for c, g in producer.groups.items() if c < cut.end]
            return producer.begun_up_to(cut.end) and all(group.done for group in groups)

    def _finished(self, group: Group) -> None:
        if self._until is not None:
            verdicts = np.asarray(self._until(group.store.columns), bool)
            if verdicts.shape != (len(group.store.uid),):
                raise ValueError(
                    f"the region's `until` gave {verdicts.shape} verdicts for "
                    f"{len(group.store.uid)} responses: one bool for each is needed"
                )
            group.keep = bool(verdicts.all())
        with self._lock:
            group.done = True
            self._lock.notify_all()

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            self._lock.notify_all()

    def _news(self) -> list[tuple[int, bool]]:
        """Verdicts of this process that the others do not know."""
        if self._until is None:
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
        store.done = self._done
        metrics = step_metrics(groups)
        for name, value in metrics.items():
            if isinstance(value, Parts):
                self._parts[name] = dataclasses.replace(value, values=())
        return store, self._parts | metrics  # all processes merge the same
