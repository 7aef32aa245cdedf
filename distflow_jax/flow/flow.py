"""Asynchronous steps of one process: samplers run ahead, the training takes a step's groups.

The rule of lag_rule.py says which groups may begin and which of them a step takes; nothing else
decides, and no process asks another one. What processes tell each other is that they have their
groups of a step, and a region's verdicts, once for each step (parallel/background_gather.py). With
swaps at boundaries verdicts follow each round of a region instead (region_rounds.py).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import EndOfData, joined
from distflow_jax.flow.evaluations import Evaluated, Evaluations, Evaluator
from distflow_jax.flow.exact_order import ExactOrder
from distflow_jax.flow.flow_config import FlowConfig
from distflow_jax.flow.host_nodes import Group, NodesAhead, step_metrics
from distflow_jax.flow.lag_rule import Cut
from distflow_jax.flow.producer import Producer
from distflow_jax.flow.region_rounds import RegionRounds
from distflow_jax.flow.sampling_thread import SamplingThread
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
        nodes: NodesAhead,
        sync: WeightSync,
        gather: BackgroundGather,
        config: FlowConfig,
        *,
        own_devices: bool,
        span: Callable[[], contextlib.AbstractContextManager],
        evaluator: Evaluator | None = None,
    ):
        """`own_devices`: whether the sampler has devices that no trainer uses. `span()` times a
        round of the sampler, in any thread. `evaluator`: with swaps at boundaries, for the versions
        that are evaluated."""
        self.producer, self._nodes, self._config = producer, nodes, config
        self._sync, self._gather, self._span = sync, gather, span
        self._lock = producer.lock
        self._told: set[int] = set()  # counters whose verdicts the others know
        self._template: FieldStore | None = None
        self._parts: dict[str, Parts] = {}  # without values: of all nodes that ran ahead
        self._version = producer.sampler.version  # the newest that was published
        # functions of the user are called from this one thread
        self._host = ThreadPoolExecutor(1, thread_name_prefix="host-nodes")
        self._running: list[Future[None]] = []
        self._evaluations: Evaluations | None = None
        if evaluator is not None:
            self._evaluations = Evaluations(evaluator, self._host, held=self._version)
        self._thread: SamplingThread | None = None
        if own_devices:
            self._thread = SamplingThread(
                producer,
                sync.arrive,
                self._round,
                order=self._exact_order() if config.swap == "boundary" else None,
                evaluations=self._evaluations,
                cache=config.cache,
            )

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
            if self._verdicts_by_rounds:
                self._drive(lambda: self._final(step))
            else:
                self._drive(lambda cut=cut: self._has(cut))
                told = self._gather.begin(self._news())
                self._drive(told.done)
                with self._lock:
                    for counter, keep in (news for theirs in told.result() for news in theirs):
                        admission.judge(counter, bool(keep))
            with self._lock:
                cut = admission.cut(step)
            if cut.final:
                if self._thread is None:  # the devices are the trainer's from here on
                    self.producer.sampler.drain()
                return self._joined(cut)

    def finish(self, step: int) -> int:
        """Ends a step that `take` has given; returns the first counter that it did not look at."""
        with self._lock:
            return self.producer.admission.finish(step).end

    def evaluated(self, version: int) -> list[Evaluated]:
        """Evaluations up to a version that were not returned before; waits for them.

        Of the versions that the evaluator evaluates; none without an evaluator.
        """
        if self._evaluations is None:
            return []
        self._drive(lambda: self._evaluations.done(version))
        return self._evaluations.take(version)

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

    # -- boundary ---------------------------------------------------------------------------------

    @property
    def _verdicts_by_rounds(self) -> bool:
        """Whether verdicts reach all processes after each round, without `take`."""
        return self._config.swap == "boundary" and self._nodes.until is not None

    def _exact_order(self) -> ExactOrder:
        rounds = RegionRounds(self.producer, self._gather) if self._verdicts_by_rounds else None
        return ExactOrder(
            self.producer.admission,
            held=self._version,
            known=rounds.known if rounds else lambda end: True,
            due=self._evaluations.due if self._evaluations else lambda version: False,
        )

    # -- waiting ----------------------------------------------------------------------------------

    def _drive(self, until: Callable[[], bool]) -> None:
        """Samples until something is true."""
        producer = self.producer
        while not until():
            self._raise_errors()
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
            self._running.append(self._host.submit(self._run_nodes, group))

    def _run_nodes(self, group: Group) -> None:
        self._nodes.run(group)
        with self._lock:
            group.done = True
            self._lock.notify_all()

    def _raise_errors(self) -> None:
        """Raises what a sampler, or a node that ran ahead, has raised."""
        if self._thread is not None:
            self._thread.raise_error()
        while self._running and self._running[0].done():
            self._running.pop(0).result()

    def _has(self, cut: Cut) -> bool:
        """Whether this process's groups of a cut have begun, and are done."""
        producer = self.producer
        with self._lock:
            groups = [g for c, g in producer.groups.items() if c < cut.end]
            return producer.begun_up_to(cut.end) and all(group.done for group in groups)

    def _final(self, step: int) -> bool:
        """Whether all verdicts that decide a step are known, and so all its groups are done."""
        with self._lock:
            return self.producer.admission.cut(step).final

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
        metrics = step_metrics(groups)
        for name, value in metrics.items():
            if isinstance(value, Parts):
                self._parts[name] = dataclasses.replace(value, values=())
        return store, self._parts | metrics  # all processes merge the same
