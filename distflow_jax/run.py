"""One training run, as every process of a job runs it.

A step trains on the samples of a source (runtime/sample_source.py): it samples when it is asked, or
hands over what samplers made while other steps trained. With the built-in graph `grpo` and the
first kind of source, a step is

    sampler.params = sync(policy.params)                  # source.begin: weights to the sampler
    batch = next(loader)                                  # source.fill: prompt
    batch |= rollout(sampler, batch)                      # response, rollout_logp
    batch |= reward(batch)                                # score
    batch |= advantage(batch)                             # advantage
    policy, metrics = update(policy, batch)

The last four lines are nodes of the graph (configs/dags/grpo.yaml), each a function of stages/;
`steps.run` walks over them (dag/plan_walker.py), and the coordinator keeps the batch. Every process
does the same in the same order; none directs the others.
"""

import contextlib
import logging
import os
import pathlib
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.checkpoint.run_lock import only_run
from distflow_jax.config.run_config import Config
from distflow_jax.coordinator.batch_metrics import means_by_age
from distflow_jax.coordinator.rounds import DATA_ENDED, PREEMPTED, Ended
from distflow_jax.data.example import Dataset
from distflow_jax.layout import Metrics
from distflow_jax.observe.metrics import without_empty
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
from distflow_jax.runtime.recorder import Recorder
from distflow_jax.runtime.run_description import describe_end, introduce, planned_metrics
from distflow_jax.runtime.run_files import (
    changes_named,
    check_writable,
    private_files,
    recorded_date,
    run_folder,
)
from distflow_jax.runtime.run_sampler import start_samplers
from distflow_jax.runtime.run_state import (
    check_lost,
    first_or_restored_state,
    node_states,
    save_state,
)
from distflow_jax.runtime.samplers.make_source import make_source
from distflow_jax.runtime.samplers.replays import open_recording
from distflow_jax.runtime.statistics import Statistics
from distflow_jax.runtime.step_schedule import StepSchedule
from distflow_jax.runtime.step_times import StepTimes
from distflow_jax.runtime.steps import make_steps
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
    """Opens what a run owns, plans it, and makes its steps."""
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
    from step to step, with samples of `source`; the rest observes without effect on any number.
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
        self.statistics = Statistics(prepared, self.runtime, self.instruments)
        self.runners = self.statistics.following(self.runtime.runners)
        self.times = StepTimes(prepared.plan, self.instruments)
        with terminal.activity("first_state"), changes_named(folder, self.config):
            self.state, self.place = first_or_restored_state(prepared, self.runtime, checkpointer)
        self.saved_step = self.state.step  # of the newest checkpoint
        self.schedule = StepSchedule.of(self.config, has_sampler=bool(prepared.samplers))
        self.recorder = Recorder(prepared, self.state, self.schedule, folder, terminal)

    def make_runtime(self) -> Runtime:
        """Builds what lives on the devices; a subclass may put other parts in."""
        return build(self.prepared, self.instruments.spans, self.phases.span)

    def loop(self, stop: StopSignal) -> int:
        """Makes all steps that are left, or those until `stop` is set; returns the exit code."""
        with contextlib.ExitStack() as files:
            files.enter_context(self.recorder)  # its report reads what the others leave
            files.callback(self.instruments.close)
            files.callback(self.statistics.close)
            self.start(files)
            try:
                while self.state.step < self.config.training.steps:
                    self.next_step(stop)
            except Ended as ended:
                return self._end(ended, stop)
        return EXIT_DONE

    def start(self, files: contextlib.ExitStack) -> None:
        """Describes the run and starts its samplers, whose memory is then known too; `files` closes
        them."""
        runtime, prepared = self.runtime, self.prepared
        self.recorder.begin(runtime)
        with self.recorder.timed("ready", self.state.step, before=self.compile_seconds):
            runtime.compiled = start_samplers(prepared, runtime, self.state, self.phases)
            if missing := runtime.compiled.shortage:
                raise ValueError(missing)
            self.source, self.evaluating = make_source(
                prepared,
                runtime,
                self.state,
                self.place,
                self.instruments,
                self.checkpointer,
                self.recorder,
                self.schedule,
            )
            files.callback(self.source.close)
            span = self.phases.span
            self.steps = make_steps(prepared, runtime, self.runners, self.source, span)
        self.recorder.ready(runtime)

    def next_step(self, stop: StopSignal) -> None:
        """Makes a step, and what is due after it. Raises Ended for a run that ends before its last
        step."""
        state, started = self.state, time.perf_counter()
        self.phases.step = step = state.step = self.state.step + 1
        with self.instruments.profile.step(step):
            try:
                metrics = self.run_step()
            except Ended:
                state.step -= 1  # there is no such step
                raise
        for action in (self._profile, self._first, self.evaluating.after):
            metrics |= action(step)
        seconds, received = time.perf_counter() - started, self.steps.held.bytes_received()
        measured, stragglers = self.times.take(step, seconds, metrics, received)
        self.recorder.step(metrics | measured, stragglers)
        stop.step_finished()
        self.checkpointer.check()
        stopping = bool(processes.all_gather_ints(np.int32(stop.is_set())).any())
        if stopping or self.schedule.saves(step):
            self.save()
        check_lost(state, self.config.training, self.folder)
        if stopping and step < self.config.training.steps:
            raise Ended(PREEMPTED)

    def run_step(self) -> dict[str, Any]:
        """Brings weights to samplers, walks over the plan, and returns the step's metrics on the
        host."""
        state, source, span = self.state, self.source, self.phases.span
        source.begin(state.step)
        rehearse = None if self.times.warm else _empty
        state.models, found = self.steps.run(state.step, state.models, rehearse)
        self.runtime.offload.update(state.models)
        # the devices are still at work: what is left of their time belongs to the last node
        with span(self.prepared.plan.units[-1].name):
            metrics = means_by_age(without_empty(jax.device_get(found)))
        # samplers may wait: before all that follows
        metrics |= source.offer(state.step, metrics, needed=self.schedule.evaluates(state.step))
        samples, held = self.runtime.coordinator.samples(), self.steps.held
        with span("statistics"), processes.coordinating():
            metrics |= self.statistics.of_step(state.step, samples, held, self.place)
            metrics |= source.observe(samples, state.step)
        of_nodes = [name for name in metrics if name.startswith("training/nonfinite/")]
        nonfinite = sum(metrics.pop(name) for name in of_nodes)
        state.count_lost(metrics, nonfinite)
        if self.recorder.takes_samples:
            samples.fields.update(held.advantages())
            self.recorder.samples(samples)
        return metrics | {"training/nonfinite": nonfinite}

    def save(self, *, goes_on: bool = True) -> None:
        """Starts a checkpoint of this step; `goes_on`: whether others are to follow. After the last
        step all evaluations are recorded first."""
        step = self.state.step
        with_samples = self.source.saves_samples and goes_on and step < self.config.training.steps
        if not with_samples:
            self.evaluating.record(step)
        with self.recorder.timed("checkpoint", step), self.phases.span("save_checkpoint"):
            self.source.before_save(with_samples=with_samples)
            saved = (self.prepared, self.state, self.place, self.checkpointer)
            save_state(*saved, added_to=with_samples)
            if with_samples:
                self.source.save(step)
        self.saved_step = step

    def _profile(self, step: int) -> Metrics:
        """Writes a profile that ends with a step."""
        if self.instruments.profile.ends_with(step):
            with self.phases.span("write_profile"):
                self.instruments.profile.close()
        return {}

    def _first(self, step: int) -> Metrics:
        """Metrics of a process's first step; ValueError for a node's state that no checkpoint
        keeps. Before an evaluation, for which models on the host leave the devices."""
        if self.times.warm:
            return {}
        node_states(self.prepared, self.state)
        with self.source.at_rest():
            return planned_metrics(self.prepared, self.runtime, self.instruments)

    def _end(self, ended: Ended, stop: StopSignal) -> int:
        """Ends the run before its last step, with as complete a checkpoint as time allows; returns
        the exit code. Collective."""
        step, goes_on = self.state.step, ended.reason != DATA_ENDED
        self.recorder.stop_reason = ended.reason
        if step and self.saved_step != step:
            self.save(goes_on=goes_on)
        if step and goes_on:
            preempted = ended.reason == PREEMPTED
            end = stop.deadline() if preempted else time.monotonic() + SAVING_SECONDS
            self.evaluating.record(step - 1, end=end)
            self.source.settle(step, end)
        elif step:
            self.evaluating.record(step)
        log.warning("%s", ended.told(step, self.config.training.steps))
        return EXIT_PREEMPTED if goes_on else EXIT_DONE


def _empty(fields: Sequence[Any]) -> Sequence[Any]:
    """Device fields of the same shapes and layouts, [K, R, ...], all 0: rows without a sequence."""
    layouts = jax.tree.map(lambda x: x.sharding, fields)
    zeros = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), out_shardings=layouts)
    return zeros(fields)
