"""Programs that alternate: each waits for a line on its stdin before it runs a step.

A program prints "STEP " and a record in JSON for each step, with its peak memory and its
CPU-seconds since its start. Needs the standard library only.
"""

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def peer_command(python: str, module: str) -> list[str]:
    """The command that starts a module of this folder by an interpreter that has its packages."""
    folder = pathlib.Path(__file__).parents[1]
    return ["env", f"PYTHONPATH={folder}", python, "-m", f"peers.{module}"]


class Side:
    """A program that waits on its stdin until it may do a step; it ends with a `with` block."""

    def __init__(self, command: Sequence[str]):
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._started = time.monotonic()

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def step(self) -> dict[str, Any]:
        """The record of one step. RuntimeError with the end of its log if the program ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("STEP "):
                since = {"since_start_s": time.monotonic() - self._started}
                return since | json.loads(line.removeprefix("STEP "))
        self._process.wait()
        self._log.seek(0)
        raise RuntimeError(f"{self._process.args} ended:\n{self._log.read()[-3000:]}")


def take_turns(
    commands: Mapping[str, Sequence[str]], rounds: int, warmup: int
) -> dict[str, list[dict[str, Any]]]:
    """Records of `warmup` steps of each program, then of `rounds` steps in turns."""
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        records: dict[str, list[dict[str, Any]]] = {}
        for name, command in commands.items():
            sides[name] = stack.enter_context(Side(command))
            records[name] = [sides[name].step() for _ in range(warmup)]
        for _ in range(rounds):
            for name, side in sides.items():
                records[name].append(side.step())
        return records


def report(record: Mapping[str, Any]) -> None:
    """Prints the record of a step, with the process's peak memory and CPU-seconds so far."""
    so_far = {"peak_gb": peak_resident_gb(), "process_cpu_s": time.process_time()}
    print("STEP " + json.dumps({**so_far, **record}), flush=True)


def clocked(function: Callable, *given: Any) -> tuple[Any, float, float]:
    """(result of a call, its seconds, CPU-seconds of all threads of this process)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function(*given)
    return result, time.perf_counter() - wall, time.process_time() - cpu


def peak_resident_gb() -> float:
    """Peak of the process's resident memory so far, in units of 2^30 bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) / 2**20


def wait_for_turn() -> None:
    """Waits for a line on stdin, in a program that is a side."""
    if not sys.stdin.readline():
        sys.exit("the other side of --paced has ended")


class StepClock:
    """Wall and CPU-seconds of steps and their phases; reports a record for each step."""

    def __init__(self, paced: bool):
        self._paced, self._count = paced, 0
        self._began: tuple[float, float] | None = None
        self._phases: dict[str, float] = {}

    def begin(self) -> None:
        """Ends the previous step, if it has not ended, waits for its turn, and starts a step."""
        self.end()
        if self._paced:
            wait_for_turn()
        self._began = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Reports the current step, if there is one."""
        if self._began is None:
            return
        wall, cpu = self._began
        self._count += 1
        record = {"step": self._count, "step_s": time.perf_counter() - wall}
        report(record | {"cpu_s": time.process_time() - cpu} | self._phases)
        self._phases, self._began = {}, None

    def add(self, name: str, value: float) -> None:
        """Adds to a number of the step, such as "tokens"."""
        self._phases[name] = self._phases.get(name, 0.0) + value

    def timed(self, name: str, function: Callable, ready: Callable[[Any], Any]) -> Callable:
        """Wraps `function`: the time until `ready` of its output has returned counts as `name`."""

        def wrapper(*args, **kwargs):
            start = time.perf_counter()
            out = function(*args, **kwargs)
            ready(out)
            self.add(name, time.perf_counter() - start)
            return out

        return wrapper
