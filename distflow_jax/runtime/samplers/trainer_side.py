"""The trainer's side of samplers that run ahead: its calls (TrainerCalls), how it takes groups."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.cluster import processes
from distflow_jax.coordinator.assignment import data_ranks
from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.observe.spans import Spans
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.step_schedule import StepSchedule
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.instruments import Instruments
from distflow_jax.runtime.run_sampler import evaluation_of
from distflow_jax.runtime.run_state import RunState
from distflow_jax.stages.evaluate import requests_of
from distflow_jax.stream.batches.group_facts import decision_of
from distflow_jax.stream.batches.partial_batches import (
    CounterPlanner,
    PartialBatchPlanner,
    PartialBatchRoom,
    ReadyPlanner,
)
from distflow_jax.stream.driver import TrainerCalls
from distflow_jax.stream.evaluations import Evaluator
from distflow_jax.stream.schedule import Admission

log = logging.getLogger("distflow_jax")


def make_trainer_calls(
    prepared: PreparedRun,
    runtime: Runtime,
    state: RunState,
    instruments: Instruments,
    schedule: StepSchedule,
    evaluates: Callable[[int], bool],
) -> TrainerCalls:
    """The calls by which a source reaches the training loop, its weights and instruments.

    `evaluates(version)`: whether samplers evaluate a version beside the training.
    """
    phases = instruments.phases
    (policy, *_) = prepared.sampled.values()

    @contextlib.contextmanager
    def weights() -> Iterator[Any]:
        with phases.span("update_weights"), runtime.offload.staying(UPDATE_WEIGHTS, state.models):
            yield state.policy_params(policy)

    def lend(of_sampler: SamplerState) -> None:
        state.models[_sampler(prepared)] = of_sampler

    return TrainerCalls(
        span=instruments.spans.span,
        note=phases.note,
        phase=phases.span,
        weights=weights,
        lend=lend,
        give_back=lambda: state.models.pop(_sampler(prepared)),
        # the first evaluation is of the weights that the sampler still holds
        keeps_weights=schedule.evaluates_first,
        evaluator=_evaluator(prepared, runtime, instruments.spans, evaluates),
    )


def _sampler(prepared: PreparedRun) -> str:
    """The key of the sampler of this process, which trainers of workers do not have."""
    return next(iter(prepared.own_samplers))


def _evaluator(
    prepared: PreparedRun, runtime: Runtime, spans: Spans, due: Callable[[int], bool]
) -> Evaluator:
    evaluation = evaluation_of(prepared, runtime)
    span = functools.partial(spans.span, "evaluation")
    requests = functools.partial(requests_of, evaluation)
    return Evaluator(due, evaluation.answer, evaluation.score, span, requests)


# -- how a step takes its groups ------------------------------------------------------------------


def _whole(prepared: PreparedRun, admission: Admission) -> PartialBatchPlanner:
    prompts = prepared.config.data.prompts_per_step
    return CounterPlanner(admission, prompts, facts_of=decision_of)


def _counter(prepared: PreparedRun, admission: Admission) -> PartialBatchPlanner:
    minis = prepared.config.training.mini_batches
    prompts = prepared.config.stream.partial_batch_prompts
    return CounterPlanner(admission, prompts, mini_batches=minis)


def _ready(prepared: PreparedRun, admission: Admission) -> PartialBatchPlanner:
    packing, minis = prepared.sizes.partial_batch, prepared.config.training.mini_batches
    rows = packing.rows[packing.primary] * data_ranks(packing.primary)
    return ReadyPlanner(admission, PartialBatchRoom(rows, packing.limits), mini_batches=minis)


# the partial batches of a run's steps, by stream.partial_batches, made of a run and the rule that
# has what all processes know
PLANNERS = {"off": _whole, "counter": _counter, "ready": _ready}


def warn_if_incomplete(checkpointer: Checkpointer, step: int) -> None:
    """Warns if the checkpoint of `step` lacks samples of a process that had no more time.
    Collective."""
    processes.all_gather_text("")  # all have added theirs then, or have no more time
    checkpointer.wait()
    complete = checkpointer.latest() or 0
    if complete != step and not processes.process_index():
        log.warning(
            "the samples that the checkpoint of step %d needs are not complete: the run goes on "
            "after step %d, its last complete one; give it more time to end by the launcher's "
            "--grace_seconds",
            step,
            complete,
        )
