"""An open run: what it owns, and what is done in a step and after it; run.py has the order."""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.cluster import processes
from distflow_jax.coordinator.batch_metrics import (
    batch_metrics,
    gather_images,
    gather_table,
    image_metrics,
    means_by_age,
    means_by_label,
    take_gaps,
)
from distflow_jax.coordinator.rounds import DATA_ENDED, PREEMPTED, Ended
from distflow_jax.layout import OF_GROUP, WEIGHT, Metrics
from distflow_jax.observe.metrics import without_empty
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.step_schedule import StepSchedule
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.evaluating import Evaluating
from distflow_jax.runtime.instruments import Instruments
from distflow_jax.runtime.mfu import Utilization
from distflow_jax.runtime.recorder import Recorder
from distflow_jax.runtime.run_description import planned_metrics
from distflow_jax.runtime.run_state import RunState, check_lost, node_states, save_state
from distflow_jax.runtime.sample_source import SampleSource
from distflow_jax.runtime.step_times import StepTimes
from distflow_jax.runtime.steps import Steps
from distflow_jax.watchdog.exit_codes import EXIT_DONE, EXIT_PREEMPTED
from distflow_jax.watchdog.supervision import StopSignal

SAVING_SECONDS = 10.0  # for the samples of a checkpoint where no worker goes on with them

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass
class OpenRun:
    """An open run, as its steps use it. `state` changes from step to step; what observes it has no
    effect on any number."""

    prepared: PreparedRun  # checked before any device worked
    runtime: Runtime  # on the devices
    state: RunState
    source: SampleSource  # of samples
    steps: Steps
    evaluating: Evaluating
    schedule: StepSchedule
    checkpointer: Checkpointer
    instruments: Instruments
    utilization: Utilization
    times: StepTimes
    recorder: Recorder

    def __post_init__(self):
        self.saved_step = self.state.step  # of the newest checkpoint


Due = Callable[[OpenRun], bool]
Action = Callable[[OpenRun, Metrics], None]  # may add to the metrics of the step


@contextlib.contextmanager
def next_step(run: OpenRun) -> Iterator[None]:
    """A block that makes the next step; if it raises Ended, there is no such step."""
    state = run.state
    state.step += 1
    run.instruments.phases.step = state.step
    run.recorder.begin_step()
    run.times.begin()
    try:
        with run.instruments.profile.step(state.step):
            yield
    except Ended:
        state.step -= 1
        raise


def rehearsal(run: OpenRun) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
    """The call that has a process's first step compile all nodes, see dag.plan_walker.run_step."""
    return None if run.times.warm else _emptied


def metrics_on_host(run: OpenRun, on_devices: Metrics) -> Metrics:
    """The metrics that a step's nodes have measured, fetched to the host: numbers, and arrays that
    `measure` takes out."""
    run.runtime.offload.update(run.state.models)
    # the devices are still at work: what is left of their time belongs to the last node
    with run.instruments.phases.span(run.prepared.plan.units[-1].name):
        values = jax.device_get(on_devices)
    arrays = {name: value for name, value in values.items() if name.endswith(OF_GROUP)}
    others = (name for name in values if not name.endswith((OF_GROUP, WEIGHT)))
    numbers = {name: values[name] for name in others}
    return means_by_label(means_by_age(without_empty(numbers))) | arrays


def measure(run: OpenRun, metrics: Metrics) -> None:
    """Adds metrics of the step's samples, and tells source and loader of these. Collective."""
    samples, step = run.runtime.coordinator.samples(), run.state.step
    batch, loader, place = run.steps.batch, run.prepared.loader, run.source.place
    with run.instruments.phases.span("statistics"), processes.coordinating():
        table = gather_table(samples, images=loader.sees)
        metrics |= batch_metrics(table, batch.tokens_per_rank())
        images = gather_images(batch.image_counts()) if loader.sees else None
        metrics |= image_metrics(images)
        mfu = functools.partial(run.utilization.mfu, step, batch, images)
        metrics |= run.instruments.measured("perf/mfu/actor", mfu)
        loader.observe(place.batches, table.counter, table.response)
        loader.observe_scores(place.batches, table.counter, table.score)
        metrics["training/global_step"] = step
        metrics["training/epoch"] = loader.epoch(place.loader_position)
        metrics |= run.source.account_for(samples, step, take_gaps(metrics, table))
    run.state.count_lost(metrics)


def _emptied(fields: Sequence[Any]) -> Sequence[Any]:
    """Device fields of the same shapes and layouts, [K, R, ...], all 0: rows without a sequence."""
    layouts = jax.tree.map(lambda x: x.sharding, fields)
    zeros = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), out_shardings=layouts)
    return zeros(fields)


# -- after a step ----------------------------------------------------------------------------------


def always(run: OpenRun) -> bool:
    """Whether an action is due that follows each step."""
    return True


def write_samples(run: OpenRun, metrics: Metrics) -> None:
    """Writes the responses of the step."""
    samples = run.runtime.coordinator.samples()
    samples.fields.update(run.steps.batch.advantages())
    run.recorder.samples(samples)


def write_profile(run: OpenRun, metrics: Metrics) -> None:
    """Writes a profile that ends with the step."""
    with run.instruments.phases.span("write_profile"):
        run.instruments.profile.close()


def describe_first(run: OpenRun, metrics: Metrics) -> None:
    """Measures a process's first step; ValueError for a node's state that no checkpoint keeps.

    Before an evaluation, for which models on the host leave the devices.
    """
    node_states(run.prepared, run.state)
    with run.source.at_rest():
        metrics |= planned_metrics(run.prepared, run.runtime, run.instruments)


def show(run: OpenRun, metrics: Metrics) -> None:
    """Shows the step, before what follows it takes its time."""
    run.recorder.show(metrics | run.times.so_far(metrics))


def evaluate(run: OpenRun, metrics: Metrics) -> None:
    """Evaluates weights, or records what samplers have evaluated."""
    metrics |= run.evaluating.after(run.state.step)


def record(run: OpenRun, metrics: Metrics) -> None:
    """Writes the step's metrics, with its costs."""
    received = run.steps.batch.bytes_received()
    costs, stragglers = run.times.take(run.state.step, metrics, received)
    run.recorder.step(metrics | costs, stragglers)


def checkpoint(run: OpenRun, metrics: Metrics) -> None:
    """Starts a checkpoint of the step, which others may follow."""
    _save(run, goes_on=True)


def check_lost_steps(run: OpenRun, metrics: Metrics) -> None:
    """Raises RuntimeError after too many steps in a row that trained on nothing."""
    check_lost(run.state, run.prepared.config.training)


def preempt(run: OpenRun, metrics: Metrics) -> None:
    """Ends the run before its last step."""
    if run.state.step < run.prepared.config.training.steps:
        raise Ended(PREEMPTED)


def end_early(run: OpenRun, ended: Ended, stop: StopSignal) -> int:
    """Ends the run before its last step, with as complete a checkpoint as time allows; returns the
    exit code. Collective.

    Where a mini-batch has changed the weights already, those of the last step are gone: there is no
    new checkpoint, and the next start goes on from the newest.
    """
    step, goes_on = run.state.step, ended.reason != DATA_ENDED
    run.recorder.stop_reason = ended.reason
    trained = {key: run.state.models[key] for key, m in run.prepared.models.items() if m.trained}
    changed = any(x.is_deleted() for x in jax.tree.leaves(trained))
    if step and not changed and run.saved_step != step:
        _save(run, goes_on=goes_on)
    if step and goes_on:
        preempted = ended.reason == PREEMPTED
        end = stop.deadline() if preempted else time.monotonic() + SAVING_SECONDS
        run.evaluating.record_evaluations(step - 1, end=end)
        if run.saved_step == step:
            run.source.finish_saving(step, end)
    elif step:
        run.evaluating.record_evaluations(step)
    log.warning("%s", ended.told(step, run.prepared.config.training.steps))
    if changed and run.saved_step != step:
        saved = run.saved_step
        log.warning("step %d had begun to train: step %d is the last saved", 1 + step, saved)
    return EXIT_PREEMPTED if goes_on else EXIT_DONE


def _save(run: OpenRun, *, goes_on: bool) -> None:
    """Starts a checkpoint of the step; `goes_on`: whether others are to follow. After the last step
    all evaluations are recorded first."""
    state, source, step = run.state, run.source, run.state.step
    more = goes_on and step < run.prepared.config.training.steps
    with_samples = source.saves_samples and more
    if not with_samples:
        run.evaluating.record_evaluations(step)
    with run.recorder.timed("checkpoint", step), run.instruments.phases.span("save_checkpoint"):
        source.before_save(with_samples=with_samples)
        save_state(run.prepared, state, source.place, run.checkpointer, added_to=with_samples)
        if with_samples:
            source.save(step)
    run.saved_step = step
