"""How a run makes a step: on the whole batch at once, or partial batch by partial batch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.dag.plan import Plan
from distflow_jax.dag.plan_walker import Runner, run_step
from distflow_jax.layout import Metrics
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.partial_batch_steps import PartialBatchSteps
from distflow_jax.runtime.sample_source import Source

Rehearse = Callable[[Sequence[Any]], Sequence[Any]]


class WholeSteps:
    """Runs each unit of the plan once, on the whole batch."""

    def __init__(
        self,
        plan: Plan,
        runners: Mapping[str, Runner],
        coordinator: Coordinator,
        source: Source,
        span: Callable[..., AbstractContextManager[Any]],
    ):
        self._plan, self._runners, self._source, self._span = plan, runners, source, span
        self.held = coordinator

    def run(
        self, step: int, states: Mapping[str, Any], rehearse: Rehearse | None
    ) -> tuple[dict[str, Any], Metrics]:
        """Runs a step; returns its states and metrics, see dag.plan_walker.run_step. Collective."""
        next_round = self._source.fill(self.held, step)
        states, metrics = run_step(
            self._plan,
            step,
            self._runners,
            states,
            self.held,
            self._span,
            next_round,
            rehearse=rehearse,
        )
        return states, metrics | self._source.measured()


Steps = WholeSteps | PartialBatchSteps


def make_steps(
    prepared: PreparedRun,
    runtime: Runtime,
    runners: Mapping[str, Runner],
    source: Source,
    span: Callable[..., AbstractContextManager[Any]],
) -> Steps:
    """The steps of a run; `runners` are those of all units."""
    plan, coordinator = prepared.plan, runtime.coordinator
    if runtime.partial_batches is None:
        return WholeSteps(plan, runners, coordinator, source, span)
    return PartialBatchSteps(
        plan,
        prepared.streamed_units,
        runtime.partial_batches,
        runners,
        runtime.partial_batch_coordinator,
        coordinator,
        source,
        span,
    )
