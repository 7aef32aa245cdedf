"""How a run evaluates its weights: after a step, or beside later steps."""

import logging
import math
import time
from typing import Protocol

from distflow_jax.layout import Metrics
from distflow_jax.observe.phases import Phases
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.step_schedule import StepSchedule
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.recorder import Recorder
from distflow_jax.runtime.run_sampler import evaluate_sampler
from distflow_jax.runtime.run_state import RunState
from distflow_jax.runtime.sample_source import Source
from distflow_jax.stages.evaluate import validation_metrics
from distflow_jax.stream.ahead import Ahead

log = logging.getLogger("distflow_jax")


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
        source: Source,
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
        """Records evaluations of versions up to one that are not recorded, and waits for them; only
        those before the first one that is late at the `end`, a time of time.monotonic()."""
        source = self._source
        with self._phases.span("testing"):
            for found in source.evaluated(up_to, end=end):
                metrics = validation_metrics(found.scored, self._config.eval.num_samples)
                self._recorder.late_evaluation(found, metrics)
        source.saver.recorded(min(source.not_evaluated(up_to), default=up_to + 1) - 1)


class EvaluateBeside(EvaluateAhead):
    """Records what workers evaluate as tasks of their own, once all processes have it."""

    def after(self, step: int) -> Metrics:
        """Brings weights that are due to workers, and records what these have evaluated.

        It waits only where more evaluations are under way than hosts keep weights for.
        """
        if self._schedule.evaluates(step):
            self._source.update_weights(step)
            if late := self._source.not_evaluated(step)[: -self._config.stream.open_evaluations]:
                self.record(late[-1])
        super().record(step, end=time.monotonic())
        return {}

    def record(self, up_to: int, *, end: float = math.inf) -> None:
        """As of EvaluateAhead; half of the time until the `end` is for samples of checkpoints.
        Warns of evaluations that are not made."""
        if end < math.inf:
            end -= max(0.0, end - time.monotonic()) / 2
        super().record(up_to, end=end)
        if late := self._source.not_evaluated(up_to):
            log.warning(
                "the weights after step %s are not evaluated: no worker has in time; "
                "distflow evaluate does, where a checkpoint has them",
                ", ".join(map(str, late)),
            )
