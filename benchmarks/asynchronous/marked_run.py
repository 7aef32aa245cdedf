"""A run that notes, after each step, the time and what its CPUs and simulated devices have done."""

import contextlib
import json
import os
import pathlib
import time
from typing import Any

from distflow_jax.parallel import processes
from distflow_jax.run import Run


class MarkedRun(Run):
    """A run with notes, which `write_marks` leaves in its folder."""

    marks: list[dict[str, Any]]

    def __init__(self, *given: Any):
        """`given`: what a Run takes."""
        self.marks = []
        super().__init__(*given)

    def run_step(self) -> dict[str, Any]:
        """One step."""
        metrics = super().run_step()
        now = {"time": time.perf_counter(), "own_cpu": own_cpu_seconds()}
        self.marks.append(now | {"machine_cpu": machine_cpu_seconds()} | self.work())
        return metrics

    def work(self) -> dict[str, Any]:
        """Seconds of simulated devices by kind of work, so far: none here."""
        return {}

    def write_marks(self) -> None:
        """Writes the notes of this process."""
        path = self.folder / f"marks-{processes.process_index()}.json"
        path.write_text(json.dumps(self.marks))


def own_cpu_seconds() -> float:
    """CPU-seconds of this process and those that it has started, so far (Linux)."""
    return sum(map(_cpu_seconds, [os.getpid(), *_descendants(os.getpid())]))


def machine_cpu_seconds() -> float:
    """CPU-seconds of everything on the machine since it was booted (Linux)."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> list[int]:
    found = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        after_name = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
