"""A run without checkpoints, and the time of each of its segments."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from distflow_jax.batch import Rows
from distflow_jax.config.run_config import Config
from distflow_jax.dag.plan_walker import Runner
from distflow_jax.layout import Metrics
from distflow_jax.observe.device_times import DeviceTimes
from distflow_jax.observe.spans import Spans
from distflow_jax.planning.plan_run import PreparedRun, prepare
from distflow_jax.planning.unit_programs import Program
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.report.terminal import Terminal
from distflow_jax.run import loop, one_step, open_run
from distflow_jax.runtime.build import Runtime, Span, build
from distflow_jax.runtime.open_run import OpenRun
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.supervision import StopSignal


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


class SegmentTimes:
    """Seconds of every segment and step of a run, and the number of rows of each program.

    Measuring does not block (observe/device_times.py), so the run is not slowed down.
    """

    def __init__(self):
        self._times, self._step = DeviceTimes(), 1
        self._host: dict[str, float] = {}
        self.rows: dict[str, int] = {}  # by segment, of its last call

    def build(self, prepared: PreparedRun, spans: Spans, phase: Span) -> Runtime:
        """The parts of a run, whose runners are timed."""
        runtime = build(prepared, spans, phase)
        timed = {
            name: self._timed(name, runner, runtime.programs.get(name))
            for name, runner in runtime.runners.items()
        }
        return dataclasses.replace(runtime, runners=timed)

    def step(self, run: OpenRun) -> Metrics:
        """One step."""
        self._step = run.state.step
        return one_step(run)

    def take(self) -> dict[str, list[float]]:
        """Seconds by segment, one number for each step but the first; ends the measurement."""
        found: dict[str, list[float]] = {}
        for key, seconds in sorted((self._times.take() | self._host).items(), key=_step):
            if _step((key, seconds)) > 1:
                found.setdefault(key.partition("/")[2], []).append(seconds)
        self._times.close()
        return found

    def _timed(self, name: str, runner: Runner, program: Program | None) -> Runner:
        def follow(states, values):
            self.rows[name] = _filled(values)
            devices, key = program.mesh.local_devices, f"{self._step}/{name}"
            # states are donated to the next program that uses them
            return self._times.follow(
                key, devices, lambda: runner(states, values), lambda found: found[1:]
            )

        def clock(states, values):
            started = time.perf_counter()
            found = runner(states, values)
            self._host[f"{self._step}/{name}"] = time.perf_counter() - started
            return found

        return clock if program is None else follow


def run_timed(
    config: Config, folder: pathlib.Path
) -> tuple[OpenRun, SegmentTimes, list[dict[str, float]]]:
    """Runs all steps; returns (the run, times of its segments, metrics of all steps but the first).

    The run's output is in stdout.txt of its new `folder`. Raises ValueError or FileNotFoundError
    for settings that do not fit.
    """
    prepared = prepare(config)
    folder.mkdir(parents=True)
    said = (folder / "stdout.txt").open("w", encoding="utf-8")
    times, quiet, watchdog = SegmentTimes(), Terminal(enabled=False), Watchdog(config.health, 1)
    with contextlib.closing(prepared.rewards), said, contextlib.redirect_stdout(said):
        opened = open_run(prepared, folder, Nowhere(folder), watchdog, quiet, build=times.build)
        with opened as run:
            loop(run, StopSignal(), times.step)
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 1]
    return run, times, steps


def _filled(values: Sequence[Any]) -> int:
    """Number of rows that hold a sequence."""
    rows = next((x for x in values if isinstance(x, Rows)), None)
    return 0 if rows is None else int(jax.device_get(rows.valid).any(-1).sum())


def _step(item: tuple[str, float]) -> int:
    return int(item[0].partition("/")[0])
