"""How a run evaluates its weights: after a step, or beside later steps."""

import math
from typing import Protocol

from distflow_jax.layout import Metrics
from distflow_jax.observe.phases import Phases
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.step_schedule import StepSchedule
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.recorder import Recorder
from distflow_jax.runtime.run_sampler import evaluate_sampler
from distflow_jax.runtime.run_state import RunState
from distflow_jax.runtime.sample_source import SampleSource
from distflow_jax.stages.evaluate import validation_metrics
from distflow_jax.stream.ahead import Ahead


class Evaluating(Protocol):
    """How a run evaluates."""

    def after(self, step: int) -> Metrics:
        """Evaluates what is due after a step, or records what samplers have evaluated."""

    def record(self, up_to: int, *, end: float = math.inf) -> None:
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

    def record(self, up_to: int, *, end: float = math.inf) -> None:
        """Nothing is left to be recorded by then."""

    def _evaluate(self, step: int) -> Metrics:
        """Evaluates the sampler's weights, which `step` steps trained; writes the responses."""
        with self._recorder.timed("evaluation", step):
            with self._phases.span("testing"), self._source.free_sampler():
                scored = evaluate_sampler(self._prepared, self._runtime, self._state)
                metrics = validation_metrics(scored, self._prepared.config.eval.num_samples)
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
        self._config, self._source = prepared.config, source
        self._recorder, self._schedule, self._phases = recorder, schedule, phases

    def after(self, step: int) -> Metrics:
        """Brings weights that are due to samplers, and records what these have evaluated."""
        if self._schedule.evaluates(step):
            self._source.update_weights(step)
        # samplers made these before they began with the groups of this step
        self.record(step - 1 - self._config.stream.max_staleness)
        return {}

    def record(self, up_to: int, *, end: float = math.inf) -> None:
        """Records evaluations of versions up to one that are not recorded, and waits for them; none
        of them if some are late at the `end` of the run, a time of time.monotonic()."""
        source = self._source
        with self._phases.span("testing"):
            if (evaluated := source.evaluated(up_to, end=end)) is None:
                return
            for found in evaluated:
                metrics = validation_metrics(found.scored, self._config.eval.num_samples)
                self._recorder.late_evaluation(found, metrics)
        source.saver.recorded(up_to)
