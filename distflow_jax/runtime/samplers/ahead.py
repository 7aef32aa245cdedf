"""A source whose samplers run ahead: a step takes the groups that are due."""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from distflow_jax.batch import Samples
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.coordinator.batch_metrics import staleness_metrics
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.layout import Metrics
from distflow_jax.observe.phases import Phases
from distflow_jax.parallel import processes
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.step_schedule import StepSchedule
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.place import Place
from distflow_jax.runtime.recorder import Recorder
from distflow_jax.runtime.run_state import RunState
from distflow_jax.runtime.sample_source import NextRound, give_step, no_round
from distflow_jax.stages.evaluate import validation_metrics
from distflow_jax.stream.batches.partial_batch_taker import PartialBatchTaker
from distflow_jax.stream.batches.rollout_taker import RolloutTaker
from distflow_jax.stream.group_stream import GroupStream

log = logging.getLogger("distflow_jax")


class Ahead:
    """Samples that were made while other steps trained, see runtime/sample_source.py.

    Attributes:
      flow: of groups; `open` brings it, as it asks for weights itself.
      taker: hands the groups of a step over.
    """

    saves_samples = True
    stream: GroupStream
    taker: GroupStream | RolloutTaker | PartialBatchTaker

    def __init__(
        self,
        prepared: PreparedRun,
        runtime: Runtime,
        state: RunState,
        place: Place,
        phases: Phases,
        schedule: StepSchedule,
        checkpointer: Checkpointer,
    ):
        self.place, self._prepared, self._runtime, self._state = place, prepared, runtime, state
        self._phases, self._schedule, self._checkpointer = phases, schedule, checkpointer
        self._resources = contextlib.ExitStack()
        self._measured: Metrics = {}

    def open(self, stream: GroupStream) -> None:
        """Takes the stream of groups, which `close` ends."""
        self.stream = self.taker = stream
        self._resources.callback(stream.close)

    def take_by(self, taker: RolloutTaker | PartialBatchTaker) -> None:
        """Takes the groups of steps by a way of their own, which `close` ends."""
        self.taker = taker
        self._resources.callback(taker.close)

    def begin(self, step: int) -> None:
        """Brings the weights of all finished steps to samplers, unless these do without."""
        if not self.stream.publications.passed_over(step - 1):
            self.update_weights(step - 1)

    def update_weights(self, version: int) -> None:
        """Brings the weights of `version` finished steps to the sampler."""
        (policy, *_), models = self._prepared.sampled.values(), self._state.models
        with (
            self._phases.span("update_weights"),
            self._runtime.offload.staying(UPDATE_WEIGHTS, models),
        ):
            self.stream.publish(self._state.policy_params(policy), version)

    def fill(self, coordinator: Coordinator, step: int) -> NextRound:
        """Hands the coordinator the groups of a step, all of whose rounds were sampled."""
        with self._phases.span("wait_for_samples"):
            store, measured = self.taker.take(step)
        self.finish(step)
        coordinator.use(store)
        give_step(self._prepared.plan, store, step)
        self._measured = coordinator.merged(measured)
        return no_round

    def finish(self, step: int) -> None:
        """Ends a step whose groups were taken."""
        self.place.look_at(self.taker.finish(step))
        self.place.begun = self.stream.producer.admission.begun

    def measured(self) -> Metrics:
        """Metrics of the nodes that ran ahead, and counts of samplers."""
        found, self._measured = self._measured, {}
        return found | self.stream.counts()

    def offer(self, step: int, metrics: Mapping[str, Any], *, needed: bool) -> Metrics:
        """Publishes the weights of a step with these metrics, or not; returns metrics of that."""
        if self._schedule.evaluates_first(step):  # of the weights that the sampler still holds
            return {}
        return self.stream.publications.offer(step, metrics, needed=needed)

    def observe(self, samples: Samples, step: int) -> Metrics:
        """Accounts for the samples of a step; returns their ages."""
        self.stream.saver.record(samples)
        return staleness_metrics(samples, step, self._prepared.config.stream.max_staleness)

    @contextlib.contextmanager
    def free_sampler(self) -> Iterator[None]:
        """A block in which nothing samples, and the run's state has the sampler's."""
        models, sampler = self._state.models, next(iter(self._prepared.samplers))
        with self.stream.suspended() as held:
            (models[sampler],) = held
            yield
            held[:] = [self._state.models.pop(sampler)]

    def at_rest(self) -> contextlib.AbstractContextManager[None]:
        """A block in which no other thread touches an array."""
        return self.stream.at_rest(0)

    def before_save(self, *, with_samples: bool) -> None:
        """Waits for records of steps; accounts for tokens where no samples are saved that do."""
        self.taker.wait()
        self.place.account = None if with_samples else self.stream.saver.total_account().to_dict()

    def save(self, step: int) -> None:
        """Adds samples to the checkpoint of a step."""
        self.stream.save(step)

    def settle(self, step: int, end: float) -> None:
        """Waits until the checkpoint of `step` has its samples, at most until `end`, a time of
        time.monotonic(); warns if it lacks some."""
        with self._phases.span("wait_for_samples"):
            end_saving(self.stream, self._checkpointer, step, end)

    def close(self) -> None:
        """Ends what samples, and what waits for it."""
        self._resources.close()


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
        stream = self._source.stream
        with self._phases.span("testing"):
            if (evaluated := stream.evaluated(up_to, end=end)) is None:
                return
            for found in evaluated:
                metrics = validation_metrics(found.scored, self._config.eval.num_samples)
                self._recorder.late_evaluation(found, metrics)
        stream.saver.recorded(up_to)


def end_saving(stream: GroupStream, checkpointer: Checkpointer, step: int, end: float) -> None:
    """Waits until the checkpoint of `step` has its samples, at most until `end`, a time of
    time.monotonic(); warns if it lacks some. Collective."""
    stream.end_saving(end)
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
