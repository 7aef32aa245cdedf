"""One training run, as every process of a job runs it: `train`, and below it the loop over steps.

One step of the built-in graph `grpo`, without what surrounds it:

    sampler.params = sync(policy.params)                  # weights to the sampler
    batch = next(loader)                                  # prompt
    batch |= rollout(sampler, batch)                      # response, rollout_logp
    batch |= reward(batch)                                # score
    batch |= advantage(batch)                             # advantage
    policy, metrics = update(policy, batch)

The last four lines are nodes of the graph (configs/dags/grpo.yaml), each a function of stages/.
`Run.run_step` is these lines for any graph: dag/plan_walker.py walks over its plan, and the
coordinator keeps the batch. Every process does the same in the same order; none directs the others.
"""

import contextlib
import functools
import logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.batch import Prompt, Samples
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.checkpoint.run_lock import only_run
from distflow_jax.config.run_config import Config
from distflow_jax.coordinator.batch_metrics import (
    batch_metrics,
    gather_images,
    gather_table,
    image_metrics,
    means_by_age,
    staleness_metrics,
)
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import EndOfData, Rounds
from distflow_jax.dag.plan import Plan
from distflow_jax.dag.plan_walker import run_step
from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.data.example import Dataset
from distflow_jax.data.loader import Loader
from distflow_jax.data.prefetch import Prefetch
from distflow_jax.data.step_columns import given_columns
from distflow_jax.flow.budgets.rollout_taker import RolloutTaker
from distflow_jax.flow.flow import Flow
from distflow_jax.flow.flow_checks import sampling_tasks
from distflow_jax.flow.homes.home_thread import Starved
from distflow_jax.layout import STEP
from distflow_jax.observe.metrics import without_empty
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel import processes
from distflow_jax.parallel.job import ALONE, Job
from distflow_jax.planning.plan_run import PreparedRun, prepare
from distflow_jax.programs.compilation_cache import kept_programs
from distflow_jax.programs.launch_log import launch_log
from distflow_jax.report import log_lines
from distflow_jax.report.json_lines import explained_disk_errors
from distflow_jax.report.terminal import Terminal
from distflow_jax.report.trackers.tracker import check_trackers
from distflow_jax.runtime.build import Runtime, build
from distflow_jax.runtime.instruments import open_instruments
from distflow_jax.runtime.mfu import Utilization
from distflow_jax.runtime.recorder import DATA_ENDED, PREEMPTED, STARVED, Recorder
from distflow_jax.runtime.run_description import describe_end, introduce, planned_metrics
from distflow_jax.runtime.run_files import (
    changes_named,
    check_writable,
    private_files,
    recorded_date,
    run_folder,
)
from distflow_jax.runtime.run_state import (
    check_lost,
    first_or_restored_state,
    loader_position,
    node_states,
    save_state,
)
from distflow_jax.runtime.samplers.replays import open_recording
from distflow_jax.runtime.samplers.run_flow import (
    end_saving,
    evaluates_ahead,
    make_flow,
    make_taker,
)
from distflow_jax.runtime.samplers.run_sampler import evaluate_sampler, start_samplers, sync_weights
from distflow_jax.runtime.step_schedule import StepSchedule
from distflow_jax.runtime.step_times import StepTimes
from distflow_jax.runtime.wave_steps import Taker, make_wave_steps
from distflow_jax.stages.evaluate import validation_metrics
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.exit_codes import EXIT_DONE, EXIT_PREEMPTED
from distflow_jax.watchdog.supervision import StopSignal, stop_on_sigterm, watched

SAVING_SECONDS = 10.0  # for the samples of a checkpoint where no worker goes on with them

log = logging.getLogger("distflow_jax")


def train(
    config: Config,
    workdir: str | os.PathLike,
    job: Job = ALONE,
    *,
    chosen: Collection[str] = (),
    stop: StopSignal | None = None,
    replay: str | os.PathLike = "",
) -> int:
    """Runs a training run, or continues it; returns the exit code. Collective.

    `job` is the job that this process has joined, see parallel/job.py. `stop` is what SIGTERM sets,
    if the caller receives that; otherwise it is received here. Meanwhile a watchdog process
    supervises this one (watchdog/controller.py). `chosen` are the config keys that the command line
    gives: they win over the settings of the graph. `replay` is the folder of a run whose recorded
    training is repeated, without a sampler; "": none.

    Raises ValueError or FileNotFoundError for user errors, before any device works.
    """
    with contextlib.ExitStack() as files:
        if stop is None:
            stop = files.enter_context(stop_on_sigterm())
        stop.leave_at_once()
        watchdog = files.enter_context(watched(config.health, job))
        stop.before_leaving.append(watchdog.stopped)
        if processes.process_index():
            log_lines.only_errors()
        folder, argv = run_folder(workdir), sys.argv
        code = _train(config, folder, watchdog, stop, chosen, argv=argv, replay=replay)
        processes.barrier("end of the run")
        watchdog.close(code)
    return code


def train_here(
    config: Config,
    workdir: str | os.PathLike,
    *,
    chosen: Collection[str] = (),
    replay: str | os.PathLike = "",
    dataset: Dataset | None = None,
) -> int:
    """Runs `train` as one process in an interpreter that lives on: a notebook's, a test's.

    `dataset`: in the place of that of data.train. There is no watchdog: it would end the
    interpreter some seconds after any error.
    """
    watchdog = Watchdog(config.health, 1)  # never started
    with stop_on_sigterm() as stop:
        folder = run_folder(workdir)
        return _train(config, folder, watchdog, stop, chosen, replay=replay, dataset=dataset)


def _train(
    config: Config,
    folder: pathlib.Path,
    watchdog: Watchdog,
    stop: StopSignal,
    chosen: Collection[str],
    *,
    argv: Sequence[str] = (),
    replay: str | os.PathLike = "",
    dataset: Dataset | None = None,
) -> int:
    if processes.process_index() == 0:  # the others have no use for their packages
        check_trackers(config.observe.trackers)
    terminal = Terminal(enabled=processes.process_index() == 0)
    with explained_disk_errors(folder), contextlib.ExitStack() as files:
        files.enter_context(private_files(config.observe.private))
        check_writable(folder)
        files.callback(terminal.close)
        release = files.enter_context(only_run(folder))
        stop.before_leaving += [terminal.console.show_cursor, release]
        saved = Checkpointer(folder / "checkpoints", config.checkpoint)
        files.callback(_close, saved, terminal)
        done = saved.latest()
        if done is not None and done >= config.training.steps:
            terminal.print(f"{folder} is finished: step {done} of {config.training.steps}.")
            terminal.print("Choose another --workdir, or raise training.steps to go on")
            return EXIT_DONE
        files.enter_context(kept_programs(config.compilation_cache))
        launches = folder / "launches" / f"{processes.process_index()}.txt"
        files.enter_context(launch_log(launches if config.observe.launches else None))
        recording = open_recording(replay, folder, done or 0) if replay else None
        date = recorded_date(pathlib.Path(replay or folder))
        prepared = prepare(config, chosen, terminal.activity, recording, dataset, date)
        files.enter_context(contextlib.closing(prepared))
        run = Run(prepared, folder, saved, watchdog, terminal)
        code = run.loop(stop)
    if code == EXIT_DONE:
        describe_end(prepared, terminal, folder, run.state.step, argv)
    return code


def _close(saved: Checkpointer, terminal: Terminal) -> None:
    """Waits for the last checkpoint, which is saved beside the steps."""
    with terminal.activity("close"):
        saved.close()


class Run:
    """The loop over steps.

    `prepared` was checked before any device worked, `runtime` lives on the devices, `state` changes
    from step to step; `instruments` and `recorder` observe without effect on any number.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        folder: pathlib.Path,
        checkpointer: Checkpointer,
        watchdog: Watchdog,
        terminal: Terminal,
    ):
        self.prepared, self.config = prepared, prepared.config
        self.folder, self.checkpointer = folder, checkpointer
        introduce(prepared, terminal)
        self.instruments = open_instruments(
            self.config.observe, folder, watchdog, terminal.activity
        )
        self.phases = self.instruments.phases
        started = time.perf_counter()
        with terminal.activity("build"):
            self.runtime = self.make_runtime()
        self.compile_seconds = time.perf_counter() - started
        if missing := self.runtime.compiled.shortage:  # before there is an array
            self.instruments.close()
            raise ValueError(missing)
        self.utilization = Utilization(prepared, self.runtime.programs)
        self.runners = self.utilization.following(self.runtime.runners)
        self.times = StepTimes(prepared.plan, self.instruments)
        with terminal.activity("first_state"), changes_named(folder, self.config):
            self.state = first_or_restored_state(prepared, self.runtime, checkpointer)
        self._saved_step = self.state.step  # of the newest checkpoint
        self.flow: Flow | None = None  # of samplers that run ahead, which `loop` starts
        self.taker: Taker | RolloutTaker | None = None  # of steps, which `loop` starts too
        self.waves = make_wave_steps(prepared, self.runtime, self.runners)
        # the rows of a step: of the batch, or of its waves
        self.held = self.waves or self.runtime.coordinator
        self.schedule = StepSchedule.of(self.config, has_sampler=bool(prepared.samplers))
        self.recorder = Recorder(prepared, self.state, self.schedule, folder, terminal)

    def make_runtime(self) -> Runtime:
        """Builds what lives on the devices; a subclass may put other parts in."""
        return build(self.prepared, self.instruments.spans, self.phases.span)

    def loop(self, stop: StopSignal) -> int:
        """Makes all steps that are left, or those until `stop` is set; returns the exit code."""
        steps, state = self.config.training.steps, self.state
        with contextlib.ExitStack() as files:
            files.enter_context(self.recorder)  # its report reads what the others leave
            for resource in (self.instruments, self.utilization):
                files.callback(resource.close)
            files.callback(_stop_sampling, self)  # also where something fails while it starts
            self._start()
            buffered = self.config.coordinator.double_buffer and not self.config.flow.ahead
            batches = _read(self.prepared.loader, self.instruments.spans)
            prompts = files.enter_context(Prefetch(batches, enabled=buffered))
            while state.step < steps:
                started = time.perf_counter()
                state.step += 1
                self.phases.step = state.step
                try:
                    with self.instruments.profile.step(state.step):
                        metrics = self.run_step(prompts)
                except Starved as missing:
                    return _end_starved(self, missing.args)
                except EndOfData as end:
                    return self._end_early(str(end) or "raise data.epochs for more")
                metrics |= self._around_step()
                received = self.held.bytes_received()
                seconds = time.perf_counter() - started
                measured, stragglers = self.times.take(state.step, seconds, metrics, received)
                self.recorder.step(metrics | measured, stragglers)
                stop.step_finished()
                self.checkpointer.check()
                stopping = bool(processes.all_gather_ints(np.int32(stop.is_set())).any())
                if stopping or self.schedule.saves(state.step):
                    self.save()
                check_lost(self.state, self.config.training, self.folder)
                if stopping and state.step < steps:
                    return self._end_preempted(stop)
        return EXIT_DONE

    def run_step(self, prompts: Iterator[list[Prompt]]) -> dict[str, Any]:
        """Syncs weights, walks over the plan once, and returns the step's metrics on the host."""
        state, plan, coordinator = self.state, self.prepared.plan, self.runtime.coordinator
        _sync_finished(self)
        ahead, rounds = dict[str, Any](), None
        rehearse = None if self.times.warm else _empty
        if self.waves is not None:
            state.models, metrics = _run_waves(self, rehearse)
        else:
            if self.flow is None:
                rounds = self._begin(prompts)
            else:
                ahead = _take_groups(self)
            state.models, metrics = run_step(
                plan,
                state.step,
                self.runners,
                state.models,
                coordinator,
                self.phases.span,
                rounds.next if rounds else _never,
                rehearse=rehearse,
            )
        self.runtime.offload.update(state.models)
        # the devices are still at work: what is left of their time belongs to the last node
        with self.phases.span(plan.units[-1].name):
            metrics = means_by_age(without_empty(jax.device_get(metrics | ahead)))
        metrics |= _offer_weights(self, metrics)  # samplers may wait: before all that follows
        samples = coordinator.samples()
        with self.phases.span("statistics"):
            metrics |= self._statistics(samples)
        if rounds is not None:
            metrics |= rounds.metrics()
        of_nodes = [name for name in metrics if name.startswith("training/nonfinite/")]
        nonfinite = sum(metrics.pop(name) for name in of_nodes)
        state.count_lost(metrics, nonfinite)
        if self.recorder.takes_samples:
            samples.fields.update(self.held.advantages())
            self.recorder.samples(samples)
        return metrics | {"training/nonfinite": nonfinite}

    def sync_weights(self, version: int) -> None:
        """Brings the weights of `version` finished steps to each sampler. Collective."""
        if self.flow is None:
            sync_weights(self.prepared, self.runtime, self.state, version, self.phases)
            return
        (policy, *_), models = self.prepared.sampled.values(), self.state.models
        with (
            self.phases.span("update_weights"),
            self.runtime.offload.staying(UPDATE_WEIGHTS, models),
        ):
            self.flow.publish(self.state.policy_params(policy), version)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluates the sampler's weights, which `step` steps trained; writes the responses.
        Collective."""
        with self.recorder.timed("evaluation", step):
            with self.phases.span("testing"), self._free_sampler():
                scored = evaluate_sampler(self.prepared, self.runtime, self.state)
                metrics = validation_metrics(scored, self.config.eval.num_samples)
            self.recorder.evaluation(step, scored)
        return metrics

    def save(self, *, goes_on: bool = True) -> None:
        """Starts a checkpoint of this step; `goes_on`: whether others are to follow. After the last
        step all evaluations are recorded first."""
        step = self.state.step
        ahead = self.flow is not None and goes_on and step < self.config.training.steps
        if not ahead:
            self._record_evaluations(step)
        with (
            self.recorder.timed("checkpoint", step),
            self.phases.span("save_checkpoint"),
        ):
            _write_checkpoint(self, with_samples=ahead)
        self._saved_step = step

    # -- what surrounds the loop ------------------------------------------------------------------

    def _start(self) -> None:
        """Describes the run and starts its samplers, whose memory is then known too."""
        runtime, state = self.runtime, self.state
        self.recorder.begin(runtime)
        with self.recorder.timed("ready", state.step, before=self.compile_seconds):
            runtime.compiled = start_samplers(self.prepared, runtime, state, self.phases)
            if missing := runtime.compiled.shortage:
                raise ValueError(missing)
            self.flow = make_flow(
                self.prepared,
                runtime,
                state,
                self.instruments,
                self.checkpointer,
                evaluates_ahead(self.config.flow, self.schedule, self.recorder, state.step),
                self.sync_weights,
            )
            self.taker = make_taker(self.prepared, self.flow, self.folder, state)
        self.recorder.ready(runtime)

    @property
    def _sampler(self) -> str:
        """State key of the sampler that evaluates, and that runs ahead."""
        return next(iter(self.prepared.samplers))

    def _record_evaluations(self, up_to: int, end: float = math.inf) -> None:
        """Records evaluations that samplers made, up to a version, or none if some are late at the
        `end` of the run, see Flow.evaluated. Waits for them. Collective."""
        if self.flow is None or self.config.flow.swap != "boundary":
            return
        with self.phases.span("testing"):
            if (evaluated := self.flow.evaluated(up_to, end=end)) is None:
                return
            for found in evaluated:
                metrics = validation_metrics(found.scored, self.config.eval.num_samples)
                self.recorder.late_evaluation(found, metrics)
        self.flow.saver.recorded(up_to)

    @contextlib.contextmanager
    def _free_sampler(self) -> Iterator[None]:
        """A block in which the sampler's state is that of a run whose samplers do not run ahead."""
        if self.flow is None:
            yield
            return
        with self.flow.suspended() as held:
            (self.state.models[self._sampler],) = held
            yield
            held[:] = [self.state.models.pop(self._sampler)]

    def _begin(self, prompts: Iterator[list[Prompt]]) -> Rounds | None:
        """Hands the coordinator the step's prompts; a region draws some in each of its rounds."""
        coordinator, region = self.runtime.coordinator, self.prepared.plan.region
        if region is None:
            coordinator.begin(_there(self._draw(prompts)))
            return None
        return Rounds(
            coordinator,
            lambda: self._draw(prompts),
            self.prepared.until,
            groups=self.config.data.prompts_per_step,
            max_rounds=region.max_rounds,
        )

    def _draw(self, prompts: Iterator[list[Prompt]]) -> dict[str, Any] | None:
        """The columns of the loader's next batch; None at the end of the data."""
        batch = next(prompts, None)
        if batch is None:
            return None
        self.state.batches += 1
        given = given_columns(batch, self.config.rollout.num_samples)
        return _with_step(self.prepared.plan, given, self.state.step)

    def _statistics(self, samples: Samples) -> dict[str, float]:
        """Metrics of the step's samples over all processes. Collective."""
        loader, state = self.prepared.loader, self.state
        with processes.coordinating():
            table = gather_table(samples, images=loader.sees)
            metrics = batch_metrics(table, self.held.tokens_per_rank())
            images = gather_images(self.held.image_counts()) if loader.sees else None
            metrics |= image_metrics(images)
            mfu = functools.partial(self.utilization.mfu, state.step, self.held, images)
            metrics |= self.instruments.measured("perf/mfu/actor", mfu)
            if self.config.flow.ahead:
                metrics |= staleness_metrics(samples, state.step, self.config.flow.max_lag)
            if self.flow is not None:
                self.flow.saver.record(samples)
            loader.observe(state.batches, table.counter, table.response)
            loader.observe_scores(state.batches, table.counter, table.score)
        return metrics | {
            "training/global_step": state.step,
            "training/epoch": loader.epoch(loader_position(self.prepared, state)),
        }

    def _around_step(self) -> dict[str, float]:
        """The end of a profile, evaluations that are due, and metrics of a process's first step."""
        step = self.state.step
        if self.instruments.profile.ends_with(step):
            with self.phases.span("write_profile"):
                self.instruments.profile.close()
        # before an evaluation, for which models on the host leave the devices
        metrics = {} if self.times.warm else _first_metrics(self)
        if self.config.flow.swap == "boundary":
            if self.schedule.evaluates(step):
                self.sync_weights(step)
            # samplers made these before they began with the groups of this step
            self._record_evaluations(step - 1 - self.config.flow.max_lag)
            return metrics
        if self.schedule.evaluates_first(step):
            # the sampler still holds the untrained weights: their evaluation need not come before
            # the first update
            self.recorder.untrained(self.evaluate(0))
        if self.schedule.evaluates(step):
            self.sync_weights(step)
            metrics |= self.evaluate(step)
        return metrics

    def _end_preempted(self, stop: StopSignal) -> int:
        """Ends the run by SIGTERM, with as complete a checkpoint as the time allows. Collective."""
        step = self.state.step
        self.recorder.stop_reason = PREEMPTED
        if self.flow is not None:
            self._record_evaluations(step - 1, stop.deadline())
            with self.phases.span("wait_for_samples"):
                end_saving(self.flow, self.checkpointer, step, stop.deadline())
        log.warning("stopped by SIGTERM after step %d; start again to go on", step)
        return EXIT_PREEMPTED

    def _end_early(self, why: str) -> int:
        """Ends the run with the data: a region took more than a batch for some steps."""
        self.state.step -= 1
        self.recorder.stop_reason = DATA_ENDED
        step, steps = self.state.step, self.config.training.steps
        log.warning("the data ended after step %d of %d; %s", step, steps, why)
        if step and self._saved_step != step:
            self.save(goes_on=False)
        elif step:
            self._record_evaluations(step)
        return EXIT_DONE


def _there(given: dict[str, Any] | None) -> dict[str, Any]:
    """The columns of a batch; EndOfData where the data have no further one."""
    if given is None:
        raise EndOfData
    return given


def _first_metrics(run: Run) -> dict[str, float]:
    """Metrics of a process's first step; ValueError for a node's state that no checkpoint keeps."""
    node_states(run.prepared, run.state)
    with run.flow.at_rest(0) if run.flow else contextlib.nullcontext():
        return planned_metrics(run.prepared, run.runtime, run.instruments)


def _sync_finished(run: Run) -> None:
    """Brings the weights of all finished steps to each sampler, unless samplers that run ahead can
    do without, or sample for evaluations alone. Collective."""
    if not sampling_tasks(run.prepared.plan):
        return
    version = run.state.step - 1
    if run.flow is None or not run.flow.publications.passed_over(version):
        run.sync_weights(version)


def _offer_weights(run: Run, metrics: dict[str, Any]) -> dict[str, float]:
    """Offers the weights of a step with these metrics to samplers that run ahead; returns metrics
    of that. Collective."""
    step = run.state.step
    if run.flow is None or run.schedule.evaluates_first(step):
        return {}
    return run.flow.publications.offer(step, metrics, needed=run.schedule.evaluates(step))


def _stop_sampling(run: Run) -> None:
    """Ends samplers that run ahead, as far as they have begun."""
    with contextlib.ExitStack() as both:
        for resource in (run.flow, run.taker):
            if resource is not None:
                both.callback(resource.close)


def _write_checkpoint(run: Run, *, with_samples: bool) -> None:
    """Starts a checkpoint, to which samples are added; records of steps before it are whole."""
    if run.taker is not None:
        run.taker.wait()
    if run.flow is not None:  # of a run whose samplers do not run ahead any more it stays
        run.state.ledger = None if with_samples else run.flow.saver.account().to_dict()
    save_state(run.prepared, run.state, run.checkpointer, added_to=with_samples)
    if with_samples:
        run.flow.save(run.state.step)


def _take_groups(run: Run) -> dict[str, Any]:
    """Hands the coordinator the step's groups; returns metrics of the nodes that ran ahead."""
    state, coordinator, flow = run.state, run.runtime.coordinator, run.flow
    taker = run.taker if isinstance(run.taker, RolloutTaker) else flow
    with run.phases.span("wait_for_samples"):
        store, measured = taker.take(state.step)
    state.look_at(taker.finish(state.step), run.config.data.prompts_per_step)
    state.begun = flow.producer.admission.begun
    coordinator.use(store)
    _give_step(run.prepared.plan, store, state.step)
    return coordinator.merged(measured) | flow.counts()


def _end_starved(run: Run, nodes: Sequence[str]) -> int:
    """Ends a run for want of workers, with a checkpoint of its last step. Collective.

    `nodes`: ids of those that no worker ran.
    """
    run.state.step -= 1
    step = run.state.step
    run.recorder.stop_reason = STARVED
    if step and run._saved_step != step:
        run.save()
        end_saving(run.flow, run.checkpointer, step, time.monotonic() + SAVING_SECONDS)
    log.warning(
        "no worker was there for %g s%s: stopped after step %d; start again, with workers, to go "
        "on",
        run.config.flow.starved_seconds,
        _told_of(run, nodes),
        step,
    )
    return EXIT_PREEMPTED


def _told_of(run: Run, nodes: Sequence[str]) -> str:
    """The nodes for a message, where workers run more of them than those that sample."""
    served = run.config.flow.worker_nodes
    return f" for {' and '.join(map(repr, nodes))} (worker --nodes)" if served else ""


def _run_waves(
    run: Run, rehearse: Callable[[Sequence[Any]], Sequence[Any]] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the step wave by wave; returns its states and metrics."""
    state, taker = run.state, run.taker
    assert not isinstance(taker, RolloutTaker), "steps in waves have no rollouts"
    models, metrics = run.waves.run(
        state.step,
        state.models,
        taker,
        run.phases.span,
        lambda store: _give_step(run.prepared.plan, store, state.step),
        rehearse,
    )
    state.look_at(taker.finish(state.step), run.config.data.prompts_per_step)
    counts = {} if run.flow is None else run.flow.counts()
    return models, metrics | counts | {"training/waves": run.waves.waves}


def _never() -> bool:
    """No round of a region: its nodes ran before the step."""
    return False


def _give_step(plan: Plan, store: FieldStore, step: int) -> None:
    """Puts what the loop gives for responses that were sampled ahead, of which nodes may have
    dropped some."""
    if STEP in dict(plan.loader_fields):
        entries = store.uid if store.is_shared((None, STEP)) else store.own
        store.put(None, STEP, np.full(len(entries), step, np.int64))


def _with_step(plan: Plan, given: dict[str, Any], step: int) -> dict[str, Any]:
    """The columns, with the number of the step where a node of the plan reads it."""
    if STEP in dict(plan.loader_fields):
        given[STEP] = np.full(len(given["uid"]), step, np.int64)
    return given


def _read(loader: Loader, spans: Spans) -> Iterator[list[Prompt]]:
    """The prompts of this process's sampler, step by step."""
    while True:
        with spans.span("read_prompts"):
            prompts = next(loader, None)
        if prompts is None:
            return
        yield prompts


def _empty(fields: Sequence[Any]) -> Sequence[Any]:
    """Device fields of the same shapes and layouts, [K, R, ...], all 0: rows without a sequence."""
    layouts = jax.tree.map(lambda x: x.sharding, fields)
    zeros = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), out_shardings=layouts)
    return zeros(fields)
