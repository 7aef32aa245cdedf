"""Sources of samples: what a run's steps train on, and where it comes from.

Synchronous samples when a step asks for it. Ahead (stream/ahead.py) has what samplers made while
other steps trained, Recorded (samplers/replays.py) what those of another run made.
run.py calls a SampleSource, and steps.py takes its samples.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from distflow_jax.batch import Prompt, Samples
from distflow_jax.coordinator.batch_metrics import Gaps
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import DATA_ENDED, Ended, NextRound, Rounds
from distflow_jax.dag.plan import Plan
from distflow_jax.data.loader import Loader
from distflow_jax.data.prefetch import Prefetch
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.layout import STEP, Metrics
from distflow_jax.observe.spans import Spans
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.instruments import Instruments
from distflow_jax.runtime.place import Place
from distflow_jax.runtime.run_sampler import sync_weights
from distflow_jax.runtime.run_state import RunState
from distflow_jax.stream.batches.partial_batches import PartialBatch
from distflow_jax.stream.checks import sampling_tasks


class SampleSource(Protocol):
    """A source of samples. All calls but `at_rest`, `status`, `stop_waiting` and `close` are
    collective.

    Attributes:
      place: in the data.
      saves_samples: whether checkpoints of steps that others follow hold samples.
    """

    place: Place
    saves_samples: bool

    def begin(self, step: int) -> None:
        """Brings the weights of all finished steps to samplers that need them."""

    def update_weights(self, version: int) -> None:
        """Brings the weights of `version` finished steps to each sampler."""

    def fill(self, coordinator: Coordinator, step: int) -> NextRound:
        """Hands the coordinator a step's prompts, or samples; returns what starts each round of a
        region. Raises Ended where there are none."""

    def measured(self) -> Metrics:
        """Metrics of the samples of the step that has run."""

    def offer(self, step: int, metrics: Mapping[str, Any], *, needed: bool) -> Metrics:
        """Publishes the weights of a step that has finished with these metrics, or not."""

    def account_for(self, samples: Samples, step: int, gaps: Gaps) -> Metrics:
        """Accounts for what a step has trained on; returns metrics of it. `gaps`: as
        far as they are measured."""

    def free_sampler(self) -> contextlib.AbstractContextManager[None]:
        """A block in which nothing samples, and the run's state has the sampler's."""

    def at_rest(self) -> contextlib.AbstractContextManager[None]:
        """A block in which no other thread touches an array."""

    def before_save(self, *, with_samples: bool) -> None:
        """Waits for what a checkpoint needs."""

    def save(self, step: int) -> None:
        """Adds samples to the checkpoint of a step."""

    def finish_saving(self, step: int, end: float) -> None:
        """Waits for these samples, at most until `end`, a time of time.monotonic()."""

    def status(self) -> str:
        """The workers that sample, for a line of a log on a long wait; "": there are none. From any
        thread."""

    def stop_waiting(self) -> None:
        """Waits for workers that are missing no longer than a few seconds: the run is told to end.
        From any thread, not collective."""

    def close(self) -> None:
        """Ends threads and connections."""


class SourceOfPartialBatches(SampleSource, Protocol):
    """A source whose steps may come in partial batches."""

    def partial_batches(self, step: int) -> Iterable[tuple[PartialBatch, FieldStore]]:
        """The partial batches of a step, and the fields of this process's groups in each, which
        `fill` gives together. Raises Ended where there are none."""

    def record(self, partial_batch: PartialBatch, *, rows: int, room: int) -> None:
        """Records a partial batch that was taken last, whose groups lie in so many rows of so
        many."""


class NoSamplersAhead:
    """Base of sources whose samplers never run while a step trains: Synchronous and Recorded."""

    saves_samples = False

    def __init__(self, place: Place):
        self.place = place

    def offer(self, step: int, metrics: Mapping[str, Any], *, needed: bool) -> Metrics:
        """Nothing: `begin` brings weights."""
        return {}

    def free_sampler(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is to be done for it."""
        return contextlib.nullcontext()

    at_rest = free_sampler

    def before_save(self, *, with_samples: bool) -> None:
        """Nothing is to be brought anywhere."""

    def save(self, step: int) -> None:
        """Adds nothing: no samples outlive their step."""

    def finish_saving(self, step: int, end: float) -> None:
        """Returns at once."""

    def status(self) -> str:
        """Nobody but this process samples."""
        return ""

    def stop_waiting(self) -> None:
        """Nothing waits for workers."""


class Synchronous(NoSamplersAhead):
    """Samples when a step asks for it: the plan's own nodes do, on prompts that this draws."""

    def __init__(
        self,
        prepared: PreparedRun,
        runtime: Runtime,
        state: RunState,
        place: Place,
        instruments: Instruments,
    ):
        super().__init__(place)
        self._prepared, self._runtime, self._state = prepared, runtime, state
        self._phases = instruments.phases
        prompts = _read(prepared.loader, instruments.spans)
        self._samples = bool(sampling_tasks(prepared.plan))  # otherwise evaluations alone do
        self._prompts = Prefetch(prompts, enabled=prepared.config.coordinator.double_buffer)
        self._rounds: Rounds | None = None  # of the step, in a region

    def begin(self, step: int) -> None:
        """Brings the weights of all finished steps to samplers that need them."""
        if self._samples:
            self.update_weights(step - 1)

    def update_weights(self, version: int) -> None:
        """Brings the weights of `version` finished steps to each sampler."""
        sync_weights(self._prepared, self._runtime, self._state, version, self._phases)

    def fill(self, coordinator: Coordinator, step: int) -> Callable[[], bool]:
        """Hands the coordinator a step's prompts; a region draws some in each of its rounds."""
        region = self._prepared.plan.region
        if not region.nodes:
            given = self._draw(step)
            if given is None:
                raise Ended(DATA_ENDED)
            coordinator.begin(given)
            return lambda: False
        self._rounds = Rounds(
            coordinator,
            lambda: self._draw(step),
            self._prepared.until,
            groups=self._prepared.config.data.prompts_per_step,
            max_rounds=region.max_rounds,
        )
        return self._rounds.next

    def measured(self) -> Metrics:
        """Metrics of a region's rounds."""
        return self._rounds.metrics() if self._rounds else {}

    def account_for(self, samples: Samples, step: int, gaps: Gaps) -> Metrics:
        """Nothing: all samples are of the step's own weights."""
        return {}

    def close(self) -> None:
        """Ends the reading of prompts."""
        self._prompts.close()

    def _draw(self, step: int) -> dict[str, Any] | None:
        """The columns of the loader's next batch; None at the end of the data."""
        batch = next(self._prompts, None)
        if batch is None:
            return None
        self.place.batches += 1
        given = loader_columns(batch, self._prepared.config.rollout.num_samples)
        if reads_step(self._prepared.plan):
            given[STEP] = np.full(len(given["uid"]), step, np.int64)
        return given


def reads_step(plan: Plan) -> bool:
    """Whether nodes of a plan read the number of the step."""
    return STEP in dict(plan.loader_fields)


def _read(loader: Loader, spans: Spans) -> Iterator[list[Prompt]]:
    """The prompts of this process's sampler, step by step."""
    while True:
        with spans.span("read_prompts"):
            prompts: Sequence[Prompt] | None = next(loader, None)
        if prompts is None:
            return
        yield list(prompts)
