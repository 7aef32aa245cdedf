"""The training run. Every process of a job runs the same steps in the same order, and none directs
the others. `train` opens the resources of a run, and `loop` makes its steps. A step is

    source.begin(step)
    state.models, on_devices = run.steps.run(step, state.models, rehearsal(run))
    metrics = metrics_on_host(run, on_devices)
    metrics |= source.offer(step, metrics, needed=run.schedule.evaluates(step))
    measure(run, metrics)

`steps.run` executes the nodes of the graph in plan order. Each node is a function of stages/,
found by registry.STAGES; the coordinator holds the batch between nodes. With the built-in graph
grpo (configs/dags/grpo.yaml), by the ids of its nodes:

    batch |= rollout(sampler, batch)                      # response, rollout_logp
    batch |= old_logp(policy, batch)                      # old_logp, if the config needs it
    batch |= reference(reference_model, batch)            # ref_logp, if the config needs it
    batch |= reward(batch)                                # score
    batch |= advantage(batch)                             # advantage
    policy, metrics = actor_train(policy, batch)

A node on a mesh is a compiled Program. Runs differ only in their source (runtime/sample_source.py).
Synchronous: `begin` copies the weights of the step before to the sampler and all nodes run, rewards
while `rollout` samples. Asynchronous: `rollout` and the host nodes that need one group alone run
ahead, in threads or on workers, or on the trainer's devices while a step waits for groups; the
remaining nodes run now, and `offer` publishes the weights that they trained.
"""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.cluster import processes
from distflow_jax.cluster.job import ALONE, Job
from distflow_jax.config.run_config import Config
from distflow_jax.config.upkeep_config import HealthConfig
from distflow_jax.coordinator.rounds import Ended
from distflow_jax.data.example import Dataset
from distflow_jax.layout import Metrics
from distflow_jax.planning.plan_run import PreparedRun, prepare
from distflow_jax.planning.step_schedule import StepSchedule
from distflow_jax.report import log_lines, run_end
from distflow_jax.report.terminal import Terminal
from distflow_jax.runtime import step_actions
from distflow_jax.runtime.build import Runtime, build
from distflow_jax.runtime.instruments import open_instruments
from distflow_jax.runtime.mfu import Utilization
from distflow_jax.runtime.recorder import Recorder
from distflow_jax.runtime.run_description import describe_end, introduce
from distflow_jax.runtime.run_files import changes_named, open_folder, recorded_date
from distflow_jax.runtime.run_sampler import load_samplers
from distflow_jax.runtime.run_state import first_or_restored_state
from distflow_jax.runtime.samplers.make_source import make_source
from distflow_jax.runtime.samplers.replays import open_recording
from distflow_jax.runtime.settled_implementations import settle_implementations
from distflow_jax.runtime.step_actions import OpenRun
from distflow_jax.runtime.step_times import StepTimes
from distflow_jax.runtime.steps import make_steps
from distflow_jax.stream.links.buffer_addresses import forget_end, mark_end
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.exit_codes import EXIT_DONE
from distflow_jax.watchdog.supervision import StopSignal, stop_on_signals, watched


def train(
    config: Config,
    workdir: str | os.PathLike,
    job: Job = ALONE,
    *,
    chosen: Collection[str] = (),
    stop: StopSignal | None = None,
    replay: str | os.PathLike = "",
    commands: run_end.Commands = run_end.no_commands,
) -> int:
    """Runs a training run, or resumes it; returns the exit code. Collective.

    `job` is the job that this process has joined, see cluster/job.py. `stop` is set by signals, if
    the caller handles these. `chosen` lists the config keys given on the command line, which
    override the settings of the graph. `replay` is the folder of a run whose recorded training is
    repeated without a sampler; "": none. `commands` are printed at the end. A watchdog process
    supervises this process.

    Raises ValueError or FileNotFoundError for user errors, before any device work.
    """
    with contextlib.ExitStack() as files:
        stop = stop or files.enter_context(stop_on_signals(signal.SIGTERM))
        stop.leave_at_once()
        watchdog = files.enter_context(watched(config.health, job))
        stop.before_leaving.append(watchdog.stopped)
        if processes.process_index():
            log_lines.only_errors()
        code = train_here(config, workdir, watchdog, stop, commands, chosen=chosen, replay=replay)
        processes.barrier("end of the run")
        watchdog.close()
    return code


def train_here(
    config: Config,
    workdir: str | os.PathLike,
    watchdog: Watchdog | None = None,
    stop: StopSignal | None = None,
    commands: run_end.Commands = run_end.no_commands,
    *,
    chosen: Collection[str] = (),
    replay: str | os.PathLike = "",
    dataset: Dataset | None = None,
) -> int:
    """Runs `train` without ending the interpreter, for notebooks and tests.

    Without `watchdog`, which would end the interpreter after an error. `dataset` replaces
    data.train.
    """
    with contextlib.ExitStack() as files:
        stop = stop or files.enter_context(stop_on_signals(signal.SIGTERM))
        folder, terminal, saved = files.enter_context(open_folder(config, workdir, stop))
        done = saved.latest() or 0
        if done >= config.training.steps:
            terminal.print(f"{folder} is finished: step {done} of {config.training.steps}.")
            terminal.print("Choose another --workdir, or raise training.steps to go on")
            if processes.process_index() == 0:
                mark_end(folder)
            return EXIT_DONE
        if processes.process_index() == 0:
            forget_end(folder)
        recording = open_recording(replay, folder, done) if replay else None
        date = recorded_date(pathlib.Path(replay or folder))
        prepared = prepare(config, chosen, terminal.activity, recording, dataset, date)
        files.enter_context(contextlib.closing(prepared))
        if not prepared.trainers_sample:
            prepared.worker_command = run_end.worker_command(str(folder), commands)
        watchdog = watchdog or Watchdog(HealthConfig(), 1)  # never started
        run = files.enter_context(open_run(prepared, folder, saved, watchdog, terminal))
        code = loop(run, stop)
    describe_end(prepared, terminal, folder, run.state.step, commands, stopped=code != EXIT_DONE)
    return code


@contextlib.contextmanager
def open_run(
    prepared: PreparedRun,
    folder: pathlib.Path,
    saved: Checkpointer,
    watchdog: Watchdog,
    terminal: Terminal,
    *,
    build: Callable[..., Runtime] = build,
) -> Iterator[OpenRun]:
    """Builds a run, creates or restores its state, and starts its samplers. Collective.

    `build` defaults to runtime/build.py's; benchmarks may substitute other parts.
    """
    with terminal.activity("trying attention and products"):
        settle_implementations(prepared, folder)
    introduce(prepared, terminal)
    with contextlib.ExitStack() as record, contextlib.ExitStack() as files:
        instruments = open_instruments(prepared.config.observe, folder, watchdog, terminal.activity)
        files.callback(instruments.close)
        phases, started = instruments.phases, time.perf_counter()
        with terminal.activity("tracing the programs of the plan"):
            runtime = build(prepared, instruments.spans, phases.span)
        seconds = time.perf_counter() - started
        runtime.compiled.check()  # before there is an array
        utilization = Utilization(prepared, runtime.programs)
        files.callback(utilization.close)
        times = StepTimes(prepared.plan, instruments)
        with terminal.activity("first_state"), changes_named(folder, prepared.config):
            state, place = first_or_restored_state(prepared, runtime, saved)
        schedule = StepSchedule.of(prepared.config, has_sampler=prepared.has_sampler)
        recorder = Recorder(prepared, state, schedule, folder, terminal)
        record.enter_context(recorder)  # closed last: its report reads what the others leave
        recorder.begin(runtime)
        began = time.perf_counter()
        load_samplers(prepared, runtime, state, phases)
        source, evaluating = make_source(
            prepared, runtime, state, place, instruments, saved, recorder, schedule
        )
        files.callback(source.close)
        terminal.details["wait_for_samples"] = source.status
        runners = utilization.following(runtime.runners)
        steps = make_steps(prepared, runtime, runners, source, phases.span)
        recorder.ready(runtime, seconds + time.perf_counter() - began)
        of_steps = (source, steps, evaluating, schedule, saved)
        yield OpenRun(
            prepared, runtime, state, *of_steps, instruments, utilization, times, recorder
        )


def one_step(run: OpenRun) -> Metrics:
    """Makes the step run.state.step; returns its metrics, on the host. Collective.

    Raises Ended if no samples are left for the step.
    """
    state, source, step = run.state, run.source, run.state.step
    source.begin(step)
    state.models, on_devices = run.steps.run(step, state.models, step_actions.rehearsal(run))
    metrics = step_actions.metrics_on_host(run, on_devices)
    metrics |= source.offer(step, metrics, needed=run.schedule.evaluates(step))
    step_actions.measure(run, metrics)
    return metrics


def after_step(stop: StopSignal) -> Sequence[tuple[step_actions.Due, step_actions.Action]]:
    """Actions after a step, in order, as (condition, action)."""
    return (
        (lambda run: run.recorder.takes_samples, step_actions.write_samples),
        (lambda run: run.instruments.profile.ends_with(run.state.step), step_actions.write_profile),
        (lambda run: not run.times.warm, step_actions.describe_first),
        (step_actions.always, step_actions.show),
        (step_actions.always, step_actions.evaluate),
        (step_actions.always, step_actions.record),
        (step_actions.always, lambda run, metrics: stop.step_finished()),
        (step_actions.always, lambda run, metrics: run.checkpointer.check()),
        (lambda run: run.schedule.saves(run.state.step), step_actions.checkpoint),
        (step_actions.always, step_actions.check_lost_steps),
        (lambda run: processes.any_process(stop.is_set()), step_actions.preempt),
    )


def loop(run: OpenRun, stop: StopSignal, step: Callable[[OpenRun], Metrics] = one_step) -> int:
    """Makes all remaining steps, or stops early once `stop` is set; returns the exit code.

    `step` lets a benchmark wrap `one_step`. Collective.
    """
    stop.when_stopped(run.source.stop_waiting)
    code = EXIT_DONE
    try:
        while run.state.step < run.prepared.config.training.steps:
            with step_actions.next_step(run):
                metrics = step(run)
            for due, action in after_step(stop):
                if due(run):
                    action(run, metrics)
    except Ended as ended:
        code = step_actions.end_early(run, ended, stop)
    run.state.over = code == EXIT_DONE
    return code
