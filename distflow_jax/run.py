"""One training run, as every process of a job runs it: `train` is the whole of it."""

import contextlib
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.config.config_dict import to_config_dict, to_json
from distflow_jax.config.run_config import Config
from distflow_jax.coordinator.batch_metrics import batch_metrics, gather_table
from distflow_jax.coordinator.rounds import EndOfData, Rounds
from distflow_jax.dag.plan_walker import run_step
from distflow_jax.dag.residency import EVALUATE, UPDATE_WEIGHTS
from distflow_jax.data.prefetch import Prefetch
from distflow_jax.data.step_columns import given_columns
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.observe import compilations
from distflow_jax.observe.memory import GIB
from distflow_jax.observe.metrics import without_empty
from distflow_jax.observe.phases import Phases
from distflow_jax.observe.profile import Profile, parse_steps
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel import device_memory, processes
from distflow_jax.parallel.job import ALONE, Job
from distflow_jax.planning.memory_advice import shortage
from distflow_jax.planning.memory_plan import plan_memory
from distflow_jax.planning.plan_run import PreparedRun, prepare
from distflow_jax.planning.program_table import (
    bytes_of_fields,
    describe,
    describe_options,
    fields_on_meshes,
)
from distflow_jax.planning.run_models import States
from distflow_jax.programs.compilation_cache import kept_programs
from distflow_jax.programs.costs import costs_of
from distflow_jax.report import progress
from distflow_jax.report.drawing import to_svg
from distflow_jax.report.plan_picture.picture import draw
from distflow_jax.report.run_writer import RunWriter
from distflow_jax.rollout.sampler import SamplerState, update_weights
from distflow_jax.runtime.build import Runtime, build
from distflow_jax.runtime.mfu import Utilization
from distflow_jax.runtime.run_files import check_writable, sample_records, warn_of_changes
from distflow_jax.runtime.step_times import StepTimes
from distflow_jax.stages.evaluate import evaluate, records, validation_metrics
from distflow_jax.stages.stage_context import own_part
from distflow_jax.training.state import TrainState
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.supervision import stop_on_sigterm, watched

EXIT_DONE = 0
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: stopped by SIGTERM with a checkpoint, start me again

log = logging.getLogger("distflow_jax")


def train(
    config: Config,
    workdir: str | os.PathLike,
    job: Job = ALONE,
    *,
    chosen: Collection[str] = (),
) -> int:
    """Runs a training run, or goes on with it; returns the exit code. Collective.

    `job` is what this process has joined, see parallel/job.py. A watchdog process looks after it
    meanwhile (watchdog/controller.py). `chosen` are the config keys that the command line gives:
    they win over the settings of the graph.

    Raises ValueError or FileNotFoundError for what the user can mend, before any device works.
    """
    with stop_on_sigterm() as stop, watched(config.health, job) as watchdog:
        code = _train(config, pathlib.Path(workdir), watchdog, stop, chosen)
        processes.barrier("end of the run")
        watchdog.close(code)
    return code


def train_here(config: Config, workdir: str | os.PathLike, *, chosen: Collection[str] = ()) -> int:
    """As `train`, alone in an interpreter that goes on afterwards: a notebook's, a test's.

    No watchdog looks after it: that would end the interpreter some seconds after any error.
    """
    nobody = Watchdog(config.health, 1)  # never started
    with stop_on_sigterm() as stop:
        return _train(config, pathlib.Path(workdir), nobody, stop, chosen)


def _train(
    config: Config,
    folder: pathlib.Path,
    watchdog: Watchdog,
    stop: threading.Event,
    chosen: Collection[str],
) -> int:
    check_writable(folder)
    with contextlib.closing(Checkpointer(folder / "checkpoints", config.checkpoint)) as saved:
        done = saved.latest()
        if done is not None and done >= config.training.steps:
            if processes.process_index() == 0:
                print(
                    f"{folder} is finished: step {done} of {config.training.steps}. Choose "
                    "another --workdir, or raise training.steps to go on"
                )
            return EXIT_DONE
        with kept_programs(config.compilation_cache):
            setup = prepare(config, chosen)
            with contextlib.closing(setup.rewards):
                return Run(setup, folder, saved, watchdog).loop(stop)


class Run:
    """The loop over steps, and what it holds: states, devices' machinery, and the run's files."""

    def __init__(
        self,
        setup: PreparedRun,
        folder: pathlib.Path,
        checkpointer: Checkpointer,
        watchdog: Watchdog,
    ):
        self.setup, self.config, self.folder = setup, setup.config, folder
        self.checkpointer = checkpointer
        self.compilations = compilations.Compilations()
        self.is_first = processes.process_index() == 0
        self.spans = Spans(
            folder / "trace.json" if self.is_first and self.config.observe.trace else None,
            process_index=processes.process_index(),
        )
        self.phases = Phases(self.spans, watchdog, processes.communication_seconds)
        self.machinery: Runtime = build(setup, self.spans)
        with self.phases.span("compile_programs"):
            self.machinery.compile()
        programs = self.machinery.programs
        self.costs = {name: costs_of(p.traced, p.compile()) for name, p in programs.items()}
        self.memory = plan_memory(setup, programs, self.costs)
        try:
            self._check_memory()  # before there is an array
        except ValueError:
            self.spans.close()
            self.compilations.close()
            raise
        self.step, self.nonfinite = 0, 0
        self.batches = 0  # of the loader that were used: one a step, or as many as a region took
        self.utilization = Utilization(setup, programs)
        self.runners = self.utilization.following(self.machinery.runners)
        profiled = parse_steps(self.config.observe.profile_steps)
        process = f"process_{processes.process_index()}"
        self.profile = Profile(folder / "profile" / process, profiled)
        self.times = StepTimes(setup.plan, self.spans, self.phases, self.compilations)
        self.states: dict[str, Any] = self._first_states()
        self.writer = RunWriter(
            folder,
            enabled=self.is_first,
            resume_step=self.step or None,
            report_every=self.config.observe.report_every,
        )

    def loop(self, stop: threading.Event) -> int:
        """All steps that are left, or those until `stop` is set; returns the exit code."""
        config, steps = self.config, self.config.training.steps
        buffered = config.coordinator.double_buffer
        evaluates = bool(config.eval.dataset and self.setup.samplers)
        with contextlib.ExitStack() as files:
            resources = (self.writer, self.spans, self.compilations, self.utilization, self.profile)
            for resource in resources:
                files.callback(resource.close)
            self._describe()
            self._start_sampler()
            self.writer.memory(self.memory.to_tree())
            line = progress.Progress(steps, done_steps=self.step, enabled=self.is_first)
            files.callback(line.close)
            prompts = files.enter_context(Prefetch(self._prompts(), enabled=buffered))
            while self.step < steps:
                started = time.perf_counter()
                first = not self.times.warm
                self.step += 1
                self.phases.step = self.step
                try:
                    with self.profile.step(self.step):
                        metrics = self.run_step(prompts)
                except EndOfData:
                    return self._end_early()
                if self.profile.ends_with(self.step):
                    with self.phases.span("write_profile"):
                        self.profile.close()
                # before an evaluation, for which what waits on the host has to make way
                planned = self._planned_metrics() if first else {}
                if self.step == 1 and evaluates:
                    # the sampler still holds the untrained weights: their evaluation need not
                    # come before the first update
                    self.writer.metrics(0, self.evaluate(0))
                last = self.step == steps
                if evaluates and (last or _due(self.step, config.eval.every)):
                    self.sync_weights(self.step)
                    metrics |= self.evaluate(self.step)
                received = self.machinery.coordinator.bytes_received()
                seconds = time.perf_counter() - started
                measured, stragglers = self.times.take(self.step, seconds, metrics, received)
                metrics |= measured | planned
                self.writer.stragglers(self.step, stragglers)
                self.writer.metrics(self.step, metrics)
                line.update(self.step, metrics)
                stopping = bool(processes.all_gather_ints(np.int32(stop.is_set())).any())
                if last or stopping or _due(self.step, config.checkpoint.every):
                    self.save()
                self._check_finite()
                if stopping and not last:
                    log.warning("stopped by SIGTERM after step %d; start again to go on", self.step)
                    return EXIT_PREEMPTED
            line.print(f"done: {steps} steps in {self.folder}")
        return EXIT_DONE

    def _end_early(self) -> int:
        """The data ended, since rounds of a region took more than a batch for some steps."""
        self.step -= 1
        log.warning(
            "the data ended after step %d of %d; raise data.epochs for more",
            self.step,
            self.config.training.steps,
        )
        if self.step and self.checkpointer.latest() != self.step:
            self.save()
        return EXIT_DONE

    def _prompts(self) -> Iterator[list[Prompt]]:
        """What this process's sampler answers, step by step."""
        while True:
            with self.spans.span("read_prompts"):
                prompts = next(self.setup.loader, None)
            if prompts is None:
                return
            yield prompts

    def run_step(self, prompts: Iterator[list[Prompt]]) -> dict[str, Any]:
        """One walk over the plan; returns the step's metrics on the host."""
        coordinator, plan = self.machinery.coordinator, self.setup.plan
        self.sync_weights(self.step - 1)
        rounds = None
        if plan.region is None:
            coordinator.begin(self._draw(prompts))
        else:
            rounds = Rounds(
                coordinator,
                lambda: self._draw(prompts),
                self.setup.until,
                groups=self.config.data.prompts_per_step,
                max_rounds=plan.region.max_rounds,
            )
        self.states, metrics = run_step(
            plan,
            self.step,
            self.runners,
            self.states,
            coordinator,
            self.phases,
            rounds,
            rehearse=None if self.times.warm else _empty,
        )
        self.machinery.offload.update(self.states)
        # the devices are still at work: what is left of their time belongs to the last node
        with self.phases.span(plan.units[-1].name):
            metrics = without_empty(jax.device_get(metrics))
        samples = coordinator.samples()
        with self.phases.span("statistics"):
            with processes.coordinating():
                table = gather_table(samples)
                metrics |= batch_metrics(table, coordinator.tokens_per_rank())
                metrics |= self.utilization.metrics(self.step, coordinator)
                self.setup.loader.observe(self.batches, table.counter, table.response)
        if rounds is not None:
            metrics |= rounds.metrics()
        metrics["training/global_step"] = self.step
        metrics["training/epoch"] = self.setup.loader.epoch(self._position())
        of_nodes = [name for name in metrics if name.startswith("training/nonfinite/")]
        metrics["training/nonfinite"] = sum(metrics.pop(name) for name in of_nodes)
        self.nonfinite = self.nonfinite + 1 if metrics["training/nonfinite"] else 0
        if self.is_first and self.nonfinite:
            self.writer.samples(f"nonfinite-{self.step}", sample_records(samples, self._tokenizer))
        elif self.is_first and _due(self.step, self.config.observe.samples_every):
            self.writer.samples(self.step, sample_records(samples, self._tokenizer))
        return metrics

    def _draw(self, prompts: Iterator[list[Prompt]]) -> dict[str, Any] | None:
        """The columns that the loader gives next; None at the end of the data."""
        batch = next(prompts, None)
        if batch is None:
            return None
        self.batches += 1
        return given_columns(batch, self.config.rollout.num_samples)

    def sync_weights(self, version: int) -> None:
        """Gives each sampler its policy's weights of `version` finished steps. Collective."""
        samplers, states = self.setup.samplers, self.states
        if all(states[key].version == version for key in samplers):
            return
        with self.phases.span("update_weights"), self._staying(UPDATE_WEIGHTS):
            for key, policy in samplers.items():
                params = self._policy_params(policy)
                states[key] = update_weights(states[key], self.machinery.sync, params, version)
            jax.block_until_ready([states[key].params for key in samplers])

    def _staying(self, name: str) -> contextlib.AbstractContextManager:
        return self.machinery.offload.staying(name, self.states)

    def _policy_params(self, key: str) -> Any:
        state = self.states[key]
        return state.params if isinstance(state, TrainState) else state

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluates the weights that the sampler holds; writes what it answered. Collective."""
        config, sampler = self.config, next(iter(self.setup.samplers))
        prompts = self.setup.eval_prompts
        with self.phases.span("testing"), self._staying(EVALUATE):
            self.states[sampler], scored = evaluate(
                self.machinery.engine,
                self.states[sampler],
                self._tokenizer,
                self.setup.rewards,
                prompts,
                config.eval.sampling_params(config.rollout.max_response_length),
                own=own_part(len(prompts), self.machinery.member, self.machinery.hosts),
                environments=self.setup.environments,
            )
            metrics = validation_metrics(scored, config.eval.num_samples)
        self.writer.samples(f"eval-{step}", records(scored))
        return metrics

    def save(self) -> None:
        """Starts a checkpoint of this step."""
        with self.phases.span("save_checkpoint"):
            info = {
                "loader": self.setup.loader.state(self._position()),
                "nonfinite": self.nonfinite,
                "model": self.setup.source.fingerprint,
                "nodes": {key: float(self.states[key]) for key in self._small_states()},
            }
            trained = {k: self.states[k] for k, m in self.setup.models.items() if m.trained}
            self.checkpointer.save(self.step, trained, info)

    # -- what surrounds the loop ------------------------------------------------------------------

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.setup.source.tokenizer

    def _position(self) -> int:
        """Counter after the last prompt trained on."""
        return self.batches * self.config.data.prompts_per_step

    def _first_states(self) -> dict[str, Any]:
        """The states of all models: from the newest checkpoint, where there is one, which sets step
        and loader too; from the source otherwise."""
        setup = self.setup
        states = States(setup.models, setup.source, self.config, self.machinery.meshes)
        offload, first = self.machinery.offload, self.machinery.first_states
        if self.checkpointer.latest() is None:
            return states.initial({}, offload.adopt) | first
        wanted = offload.abstract(states.abstract())
        self.step, restored, info = self.checkpointer.restore(None, wanted)
        setup.loader.restore(info["loader"])
        self.batches = setup.loader.position // self.config.data.prompts_per_step
        self.nonfinite = info["nonfinite"]
        small = {key: np.float32(value) for key, value in info["nodes"].items()}
        return states.initial(restored, offload.adopt) | first | small

    def _small_states(self) -> list[str]:
        """Keys of the states that are one number of a node's own, an adaptive coefficient."""
        others = {*self.setup.models, *self.setup.samplers}
        return [key for key in self.states if key not in others]

    def _start_sampler(self) -> None:
        """First weights for the samplers; compiles all of their programs."""
        engine, compiled = self.machinery.engine, False
        if engine is None:
            return
        with self._staying(UPDATE_WEIGHTS):
            for key, policy in self.setup.samplers.items():
                with self.phases.span("update_weights"):
                    weights = self.machinery.sync(self._policy_params(policy))
                self.states[key] = SamplerState(weights, self.step, engine.init_decode_state())
                if not compiled:
                    with self.phases.span("compile_sampler"):
                        engine.compile(weights)
                        self.memory = self.memory.with_sampler(
                            engine.programs.temporaries(weights),
                            self.machinery.sync.temporaries(self._policy_params(policy)),
                        )
                compiled = True
        self._check_memory()

    def _check_memory(self) -> None:
        """ValueError where devices have less than the plan needs, as far as that is known."""
        programs = self.machinery.programs
        if missing := shortage(self.setup, self.memory, programs, self.costs):
            raise ValueError(missing)

    def _describe(self) -> None:
        """Writes config and plan, and prints what a person wants to see before step 1."""
        setup, described = self.setup, json.loads(to_json(to_config_dict(self.config)))
        if self.is_first and self.step:
            log.info("continuing from step %d in %s", self.step, self.folder)
            warn_of_changes(self.folder / "config.json", described)
        self.writer.config(described)
        programs = self.machinery.programs
        fields = fields_on_meshes(setup.plan, programs)
        engine = self.machinery.engine
        options = describe_options(programs.values(), engine and engine.mesh)
        tables = f"{describe(fields, self.costs)}\n{options}\n{self.memory.describe()}"
        text = f"{setup.text()}\n{tables}"
        drawing = draw(setup.plan, sizes=bytes_of_fields(fields))
        picture = to_svg(drawing, f"plan {setup.plan.name}")
        digest = f"\n\ndigest {setup.plan.digest}"
        self.writer.plan(text + digest, svg=picture, tree=setup.plan.to_json())
        if self.is_first:
            progress.introduce(
                f"{setup.source.spec}, dag {setup.plan.name}, {self.folder}",
                setup.table(),
                text,
            )
            if setup.loader.dropped:
                log.warning("%d overlong prompts were dropped", setup.loader.dropped)

    def _planned_metrics(self) -> dict[str, float]:
        """What lies on a device between two steps, of this process the fullest, beside what was
        planned, in GiB; and the share of time that stages were planned to wait, if there are any.
        """
        bubble = self.setup.sizes.bubble_share
        waits = {"perf/pipeline_bubble": bubble} if bubble else {}
        return waits | {
            "perf/memory_live_gb": device_memory.live_bytes() / GIB,
            "perf/memory_live_planned_gb": self.memory.between / GIB,
            "perf/memory_planned_gb": self.memory.fullest.total / GIB,
        }

    def _check_finite(self) -> None:
        if self.nonfinite > self.config.training.max_nonfinite:
            raise RuntimeError(
                f"loss or gradient was not finite in {self.nonfinite} steps in a row, the last "
                f"being {self.step}; the batches are in {self.folder / 'samples'} as nonfinite-*. "
                "Lower training.optimizer.lr, or raise training.max_nonfinite"
            )


def _empty(fields: Sequence[Any]) -> Sequence[Any]:
    """Device fields of the same shapes and layouts, all 0: rows without a sequence."""
    layouts = jax.tree.map(lambda x: x.sharding, fields)
    zeros = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), out_shardings=layouts)
    return zeros(fields)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
