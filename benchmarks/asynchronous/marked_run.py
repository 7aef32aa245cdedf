"""A run that notes, after each step, the time and what its CPUs and simulated devices have done."""

import contextlib
import json
import os
import pathlib
import time
from typing import Any

from distflow_jax.cluster import processes
from distflow_jax.layout import Metrics
from distflow_jax.observe.spans import Spans
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.run import one_step
from distflow_jax.runtime.build import Runtime, Span, build
from distflow_jax.runtime.open_run import OpenRun


class MarkedRun:
    """Notes of a run whose parts `build` makes, and whose steps `step`: see run.open_run, run.loop.
    `write_marks` leaves them in its folder."""

    def __init__(self):
        self.marks: list[dict[str, Any]] = []

    def build(self, prepared: PreparedRun, spans: Spans, phase: Span) -> Runtime:
        """The parts of the run, as of runtime/build.py."""
        return build(prepared, spans, phase)

    def step(self, run: OpenRun) -> Metrics:
        """One step."""
        metrics = one_step(run)
        now = {"time": time.perf_counter(), "own_cpu": own_cpu_seconds()}
        self.marks.append(now | {"machine_cpu": machine_cpu_seconds()} | self.work(run))
        return metrics

    def work(self, run: OpenRun) -> dict[str, Any]:
        """Seconds of simulated devices by kind of work, so far: none here."""
        return {}

    def write_marks(self, folder: pathlib.Path) -> None:
        """Writes the notes of this process."""
        path = folder / f"marks-{processes.process_index()}.json"
        path.write_text(json.dumps(self.marks))


def own_cpu_seconds() -> float:
    """CPU-seconds of this process and those that it has started, so far (Linux)."""
    return sum(map(_cpu_seconds, [os.getpid(), *descendants(os.getpid())]))


def machine_cpu_seconds() -> float:
    """CPU-seconds of everything on the machine since it was booted (Linux)."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Processes that a process and its children have started (Linux)."""
    found = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        after_name = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
