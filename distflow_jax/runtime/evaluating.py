"""How a run evaluates its weights: after a step, or beside later steps."""

import logging
import math
from collections.abc import Sequence
from typing import Protocol

from distflow_jax.cluster import processes
from distflow_jax.layout import Metrics
from distflow_jax.observe.phases import Phases
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.step_schedule import StepSchedule
from distflow_jax.rewards.pool import FailedRewards
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.recorder import Recorder
from distflow_jax.runtime.run_sampler import evaluate_sampler
from distflow_jax.runtime.run_state import RunState
from distflow_jax.runtime.sample_source import SampleSource
from distflow_jax.stages.evaluate import Scored, validation_metrics
from distflow_jax.stream.ahead import Ahead

log = logging.getLogger("distflow_jax")


class Evaluating(Protocol):
    """How a run evaluates."""

    def after(self, step: int) -> Metrics:
        """Evaluates what is due after a step, or records what samplers have evaluated."""

    def record_evaluations(self, up_to: int, *, end: float = math.inf) -> None:
        """Records evaluations of versions up to one that are not recorded yet."""


class EvaluateNow:
    """Evaluates after the steps that are due, while nothing else samples."""

    def __init__(
        self,
        prepared: PreparedRun,
        runtime: Runtime,
        state: RunState,
        source: SampleSource,
        recorder: Recorder,
        schedule: StepSchedule,
        phases: Phases,
    ):
        self._prepared, self._runtime, self._state = prepared, runtime, state
        self._source, self._recorder = source, recorder
        self._schedule, self._phases = schedule, phases

    def after(self, step: int) -> Metrics:
        """Evaluates the weights after a step; of the first one, the untrained ones too."""
        if self._schedule.evaluates_first(step):
            # the sampler still holds the untrained weights: their evaluation need not come before
            # the first update
            self._recorder.untrained(self._evaluate(0))
        if not self._schedule.evaluates(step):
            return {}
        self._source.update_weights(step)
        return self._evaluate(step)

    def record_evaluations(self, up_to: int, *, end: float = math.inf) -> None:
        """Nothing is left to be recorded by then."""

    def _evaluate(self, step: int) -> Metrics:
        """Evaluates the sampler's weights, which `step` steps trained; writes the responses."""
        with self._recorder.timed("evaluation", step):
            with self._phases.span("testing"), self._source.free_sampler():
                scored = evaluate_sampler(self._prepared, self._runtime, self._state)
                metrics = _metrics_of(self._prepared, step, scored)
            self._recorder.evaluation(step, scored)
        return metrics


class EvaluateAhead:
    """Records what samplers evaluate when they take a version, while later steps train."""

    def __init__(
        self,
        prepared: PreparedRun,
        source: Ahead,
        recorder: Recorder,
        schedule: StepSchedule,
        phases: Phases,
    ):
        self._prepared, self._source = prepared, source
        self._recorder, self._schedule, self._phases = recorder, schedule, phases

    def after(self, step: int) -> Metrics:
        """Brings weights that are due to samplers, and records what these have evaluated."""
        if self._schedule.evaluates(step):
            self._source.update_weights(step)
        self.record_evaluations(self._source.evaluated_by(step))
        return {}

    def record_evaluations(self, up_to: int, *, end: float = math.inf) -> None:
        """Records evaluations of versions up to one that are not recorded, and waits for them: with
        an `end`, a time of time.monotonic(), until then, and without, unless workers are missing.

        Of those that are not there all processes leave out the first one and all after it.
        """
        source = self._source
        with self._phases.span("testing"):
            for found in source.evaluated(up_to, end=end):
                metrics = _metrics_of(self._prepared, found.version, found.scored)
                self._recorder.late_evaluation(found, metrics)
        late = source.not_evaluated(up_to)
        source.saver.recorded(min(late, default=up_to + 1) - 1)
        if late and processes.process_index() == 0:
            log.warning(
                "no sampler has evaluated the weights after step %s in time: a run that goes on "
                "from an earlier checkpoint does, and distflow evaluate, if a checkpoint has them",
                ", ".join(map(str, late)),
            )


def _metrics_of(prepared: PreparedRun, step: int, scored: Sequence[Scored]) -> Metrics:
    """Metrics of an evaluation, or of one that failed the numbers of its failures: it ends no run,
    whose training may be sound. Collective."""
    try:
        return validation_metrics(scored, prepared.config.eval.num_samples, prepared.rewards)
    except FailedRewards as error:
        if processes.process_index() == 0:
            log.warning("the evaluation after step %d has no scores: %s", step, error)
        return dict(error.metrics)
