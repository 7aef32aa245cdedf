"""A whole GRPO step as scripts/train.py runs it, and its segments beside what plan.py predicts."""

import contextlib
import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from device.work import Work, step_run

from distflow_jax.config.run_config import Config
from distflow_jax.dag.plan_walker import Runner
from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.layout import Metrics
from distflow_jax.observe.device_times import DeviceTimes
from distflow_jax.observe.spans import Spans
from distflow_jax.planning.chips import Chip
from distflow_jax.planning.plan_run import PreparedRun, prepare
from distflow_jax.planning.unit_programs import Program
from distflow_jax.pods.pod_plan import plan_on
from distflow_jax.pods.topology import present_pod
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.report.terminal import Terminal
from distflow_jax.run import loop, one_step, open_run
from distflow_jax.runtime.build import Runtime, Span, build
from distflow_jax.runtime.step_actions import OpenRun
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.supervision import StopSignal

_SHOWN = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/update_weights",
    "perf/mfu/actor",
    "perf/throughput",
    "response_length/mean",
    "prompt_length/mean",
    "training/off_policy/trajectory_staleness/mean",
)


def time_step(
    model: str, chip: Chip, work: Work, *, micro_rows: int, folder: pathlib.Path, staleness: int = 0
) -> dict[str, Any]:
    """Medians over the steps after the first, which compiles; segments of synchronous steps only.

    Raises ValueError if sizes do not fit together, or exceed memory.
    """
    run, programs, steps = run_timed(step_run(model, work, micro_rows, staleness), folder)
    medians = {
        name: statistics.median(step[name] for step in steps)
        for name in _SHOWN
        if all(name in step for step in steps)
    }
    segments = {} if staleness else {"segments": _segments(run, programs, medians, chip)}
    return segments | {
        "staleness": staleness,
        "prompts": work.prompts,
        "samples": work.samples,
        "longest_response": work.response,
        "micro_rows": micro_rows,
        "steps": len(steps),
        "medians": medians,
        "step_seconds": [step["timing_s/step"] for step in steps],
        "peak_gb_so_far": steps[-1]["perf/max_memory_allocated_gb"],
        "planned_gb": run.runtime.compiled.memory.fullest.total / 2**30,
        "compilations": sum(step["perf/compilations"] for step in steps),
    }


def _segments(
    run: OpenRun, steps: Sequence[dict[str, float]], medians: Mapping[str, float], chip: Chip
) -> list[dict[str, Any]]:
    """Predicted seconds of each segment at the chip's rates, and the median of the measured ones.

    Programs are those that ran; the plan gets the mean length of the sampled responses. `steps`:
    seconds of the programs in each.
    """
    programs = run.runtime.programs
    plan = plan_on(
        present_pod(chip),
        run.prepared,
        mean_response=round(medians["response_length/mean"]),
        programs=programs,
        only=(*programs, UPDATE_WEIGHTS),
    )
    predicted = {"rollout": plan.generation.whole} | plan.estimates
    measured = {name: statistics.median(step[name] for step in steps) for name in programs}
    measured |= {"rollout": medians["timing_s/gen"]}
    measured |= {UPDATE_WEIGHTS: medians["timing_s/update_weights"]}
    return [
        {
            "segment": name,
            "filled": plan.filled.get(name, 1.0),
            "predicted_seconds": one.total,
            "bound": one.bound,
            "measured_seconds": measured[name],
            "ratio": measured[name] / one.total,
        }
        for name, one in predicted.items()
    ]


# -- a run without checkpoints, whose programs are timed --


class Nowhere:
    """A Checkpointer and its AdditionWriter, which keep the number of the last step alone."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.additions = folder / "checkpoints", self
        self._last: int | None = None

    def latest(self) -> int | None:
        """The last step that was given to save; None: a run begins."""
        return self._last

    def check(self) -> None:
        """Raises nothing: no save can fail."""

    def wait(self, seconds: float | None = None) -> None:
        """Returns at once."""

    def save(
        self, step: int, trained: Any, info: Mapping[str, Any], *, added_to: bool = False
    ) -> None:
        """Saves nothing."""
        self._last = step

    def add(self, step: int, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Adds nothing."""


class ProgramTimes:
    """Seconds for which each program of a run has its devices, step by step."""

    def __init__(self):
        self._times = DeviceTimes()
        self.steps: list[dict[str, float]] = []

    def build(self, prepared: PreparedRun, spans: Spans, phase: Span) -> Runtime:
        """The parts of a run, whose programs are timed."""
        runtime = build(prepared, spans, phase)
        timed = {name: self._timed(name, program) for name, program in runtime.programs.items()}
        return dataclasses.replace(runtime, runners=runtime.runners | timed)

    def step(self, run: OpenRun) -> Metrics:
        """One step."""
        metrics = one_step(run)
        self.steps.append(self._times.take())
        return metrics

    def close(self) -> None:
        """Ends the measurement."""
        self._times.close()

    def _timed(self, name: str, program: Program) -> Runner:
        def follow(states, values):
            # states are donated to the next program that uses them
            return self._times.follow(
                name,
                program.mesh.local_devices,
                lambda: program(states, values),
                lambda found: found[1:],
            )

        return follow


def run_timed(
    config: Config, folder: pathlib.Path
) -> tuple[OpenRun, list[dict[str, float]], list[dict[str, float]]]:
    """Runs all steps; returns (the run, seconds of its programs and metrics of all steps but the
    first).

    The run's output is in stdout.txt of its new `folder`. Raises ValueError or FileNotFoundError
    for settings that do not fit.
    """
    prepared = prepare(config)
    folder.mkdir(parents=True)
    said = (folder / "stdout.txt").open("w", encoding="utf-8")
    times, quiet, watchdog = ProgramTimes(), Terminal(enabled=False), Watchdog(config.health, 1)
    with contextlib.closing(prepared.rewards), said, contextlib.redirect_stdout(said):
        opened = open_run(prepared, folder, Nowhere(folder), watchdog, quiet, build=times.build)
        with contextlib.closing(times), opened as run:
            loop(run, StopSignal(), times.step)
    rows = read_metrics(folder / "metrics.jsonl")
    return run, times.steps[1:], [row for row in rows if row["step"] > 1]
