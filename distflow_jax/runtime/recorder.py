"""The record of a run: files in its folder, rows for its trackers, lines on its terminal."""

import contextlib
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Samples
from distflow_jax.cluster import processes
from distflow_jax.coordinator.rounds import NO_WORKERS, PREEMPTED
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.step_schedule import StepSchedule
from distflow_jax.report.progress import RunProgress
from distflow_jax.report.provenance import provenance
from distflow_jax.report.run_writer import RunWriter
from distflow_jax.report.terminal import Terminal
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.instruments import open_trackers
from distflow_jax.runtime.run_description import describe_run, describe_start
from distflow_jax.runtime.run_files import evaluation_lines, sample_lines
from distflow_jax.runtime.run_state import RunState
from distflow_jax.stages.evaluate import EVALUATED, Scored
from distflow_jax.stream.evaluations import Evaluated

DONE = "done"
UNFINISHED = (PREEMPTED, NO_WORKERS)  # to be resumed; a tracker counts such a run as failed


class Recorder:
    """The record of one start of a run; process 0 alone writes and prints.

    `state` is read for the number of the step. `stop_reason` is what the record says at the end:
    DONE, or the reason of Ended, unless an error ends the run. The record survives a resume: steps
    after the checkpoint's are dropped, events are kept.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        state: RunState,
        schedule: StepSchedule,
        folder: pathlib.Path,
        terminal: Terminal,
    ):
        self.stop_reason = DONE
        self._prepared, self._state, self._schedule = prepared, state, schedule
        self._folder, self._terminal = folder, terminal
        self._is_first = processes.process_index() == 0
        observe = prepared.config.observe
        trackers = open_trackers(observe, folder)
        self._writer = RunWriter(
            folder,
            enabled=self._is_first,
            resume_step=state.step or None,
            report_every=observe.report_every,
            trackers=trackers,
        )
        self._progress: RunProgress | None = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Records why the run ends, and closes the files."""
        reason = self.stop_reason if kind is None else f"failed with {kind.__name__}"
        unfinished = kind is not None or self.stop_reason in UNFINISHED
        # an error is told even if its disk takes no line more
        with contextlib.suppress(*() if kind is None else (OSError,)):
            facts = {"step": self._state.step, "reason": reason, "unfinished": unfinished}
            self._writer.event("stop", facts)
        if self._progress is not None:
            self._progress.close()
        self._writer.close(failed=unfinished)

    def begin(self, runtime: Runtime) -> None:
        """Writes config, plan and provenance; warns of what may surprise."""
        if self._is_first:
            facts = {"step": self._state.step, **provenance(self._folder)}
            self._writer.event("start", facts, at=self._terminal.began)
        describe_run(
            self._prepared, runtime, self._writer, self._terminal, self._folder, self._state.step
        )

    def ready(self, runtime: Runtime, seconds: float) -> None:
        """Writes the `seconds` until step 1 may begin, and the memory of the programs, all of which
        are compiled; shows the progress."""
        self._writer.event("ready", {"step": self._state.step, "seconds": round(seconds, 3)})
        waiting, tree = self._prepared.waiting, runtime.compiled.memory.to_tree()
        self._writer.memory(tree | ({"host": waiting.to_tree()} if waiting else {}))
        describe_start(runtime, self._terminal, self._folder, self._state.step)
        self._progress = RunProgress(
            self._schedule.steps,
            terminal=self._terminal,
            done_steps=self._state.step,
            coming=self._schedule.coming,
        )

    @contextlib.contextmanager
    def timed(self, event: str, step: int) -> Iterator[None]:
        """Records an event and its seconds."""
        started = time.perf_counter()
        yield
        seconds = round(time.perf_counter() - started, 3)
        self._writer.event(event, {"step": step, "seconds": seconds})

    def begin_step(self) -> None:
        """Names the step state.step in lines on what is under way."""
        self._terminal.doing = f"step {self._state.step}/{self._schedule.steps}"

    def step(self, metrics: Mapping[str, Any], stragglers: Mapping[str, Any]) -> None:
        """Records the metrics of a step that has ended, and its table of stragglers."""
        self._writer.stragglers(self._state.step, stragglers)
        self._writer.metrics(self._state.step, metrics)
        self._progress.observe(self._state.step, metrics)

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of a step that has ended; its evaluation follows."""
        self._progress.update(self._state.step, metrics)

    def untrained(self, metrics: Mapping[str, float]) -> None:
        """Records the evaluation of the untrained weights."""
        self._writer.metrics(0, metrics)
        self._progress.evaluation(metrics)

    def late_evaluation(self, evaluated: Evaluated, metrics: Mapping[str, float]) -> None:
        """Records an evaluation that a sampler has made while later steps were trained.
        Collective."""
        step = evaluated.version
        self.evaluation(step, evaluated.scored)
        self._writer.late_metrics(step, metrics)
        seconds = round(evaluated.seconds, 3)
        facts = {"step": step, "seconds": seconds}
        self._writer.event("evaluation", facts, at=evaluated.ended)
        self._progress.evaluation(metrics, step)

    def has_evaluation(self, step: int) -> bool:
        """Whether the record has an evaluation of the weights after `step` steps. Collective."""
        found = self._is_first and self._writer.has_metric(step, EVALUATED)
        return bool(processes.all_gather_ints(np.int32(found))[0])

    def evaluation(self, step: int, scored: Sequence[Scored]) -> None:
        """Writes the responses of an evaluation of the weights after `step` steps: those of all
        processes, each of which gives its own. Collective."""
        self._writer.samples(f"eval-{step}", evaluation_lines(scored))

    @property
    def takes_samples(self) -> bool:
        """Whether the step's responses are due, or the step was not finite; on all processes."""
        step, nonfinite = self._state.step, self._state.nonfinite
        return bool(nonfinite) or self._schedule.writes_samples(step)

    def samples(self, samples: Samples) -> None:
        """Writes the step's responses: those of all processes, each of which gives its own.
        Collective."""
        name = f"nonfinite-{self._state.step}" if self._state.nonfinite else self._state.step
        self._writer.samples(name, sample_lines(samples, self._prepared.source.tokenizer))
