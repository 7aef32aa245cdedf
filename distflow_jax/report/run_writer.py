"""Writer of a run's folder.

It contains config.json, plan.{txt,svg,json}, memory.json, metrics.jsonl, stragglers.jsonl,
events.jsonl, samples/ and report.html; trackers follow it (trackers/). metrics.jsonl has one JSON
object per step with "step" and the metrics by name. An evaluation that ends after later steps has a
second object of its step, which `read_metrics` joins. Floats have as many digits as give the same
float64 again. JSON has no NaN or infinity: they are the strings "NaN", "Infinity" and "-Infinity",
which `read_metrics` converts.
"""

import json
import logging
import os
import pathlib
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distflow_jax.report.json_lines import (
    append,
    complete_lines,
    json_number,
    metrics_row,
    write_atomic,
)
from distflow_jax.report.page import report
from distflow_jax.report.trackers.sender import Trackers

PULSE_SECONDS = 30.0  # between two events of steps
log = logging.getLogger("distflow_jax")

_SAMPLES = re.compile(r"(?:eval-|nonfinite-)?([0-9]+)")


class RunWriter:
    """Writes the files of one run. Only one process is `enabled`; all others write nothing.

    Args:
      folder: the run's folder.
      enabled: whether this process writes.
      resume_step: step of the checkpoint from which the run continues; None for a new run. Output
        of later steps, by an earlier interrupted run, is dropped, so that each step appears once.
        To lose no step, write its metrics before its checkpoint is saved.
      report_every: steps between updates of report.html; 0: only at the end.
      trackers: followers of the folder, by report/trackers/sender.py; None for a folder alone.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        enabled: bool = True,
        resume_step: int | None = None,
        report_every: int = 0,
        trackers: Trackers | None = None,
    ):
        self._enabled = enabled
        self._report_every, self._trackers = report_every, trackers
        self._last_step = -1 if resume_step is None else resume_step
        self.folder = pathlib.Path(folder)
        if not enabled:
            return
        (self.folder / "samples").mkdir(parents=True, exist_ok=True)
        self._metrics_path = self.folder / "metrics.jsonl"
        dropped = truncate_metrics(self._metrics_path, self._last_step)
        if dropped and resume_step is None:
            log.warning(
                "%s has no checkpoint: the run begins at step 1, and the samples and %d lines of "
                "metrics.jsonl of an earlier run are removed",
                self.folder,
                dropped,
            )
        self._stragglers_path = self.folder / "stragglers.jsonl"
        truncate_metrics(self._stragglers_path, self._last_step)
        for path in (self.folder / "samples").glob("*.jsonl"):
            found = _SAMPLES.fullmatch(path.stem)
            if found and int(found[1]) > self._last_step:
                path.unlink()
        self._events = RunEvents(self.folder / "events.jsonl")

    def config(self, config: Mapping[str, Any]) -> None:
        """Writes config.json. `config` is a nested mapping with JSON values."""
        if self._enabled:
            text = json.dumps(config, indent=2, allow_nan=False)
            write_atomic(self.folder / "config.json", text + "\n")

    def plan(self, text: str, *, svg: str = "", tree: str = "") -> None:
        """Writes plan.txt and, if given, plan.svg and plan.json; config.json must be written."""
        for name, content in (("plan.txt", text), ("plan.svg", svg), ("plan.json", tree)):
            if self._enabled and content:
                write_atomic(self.folder / name, content.rstrip() + "\n")
        if self._enabled and self._trackers:
            self._trackers.begin()

    def memory(self, tree: Mapping[str, Any]) -> None:
        """Writes memory.json: the memory of the devices, as JSON values."""
        if self._enabled:
            write_atomic(self.folder / "memory.json", json.dumps(tree, indent=1) + "\n")

    def event(self, kind: str, facts: Mapping[str, Any], *, at: float | None = None) -> None:
        """Appends an event to events.jsonl, see RunEvents.add."""
        if self._enabled:
            self._events.add(kind, facts, at=at)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends the metrics of one step to metrics.jsonl, and wakes the trackers.

        Args:
          step: higher than in the last call.
          values: scalars by name.

        Raises:
          ValueError: a step that is not after the last one, or a value that is not a number.
        """
        if not self._enabled:
            return
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} after those of step {self._last_step}")
        self._append(step, values)
        self._last_step = step
        self._events.step(step)
        if self._trackers:
            self._trackers.rows(step)
        if self._report_every and step and step % self._report_every == 0:
            self._report()

    def late_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends further metrics of a step after those of `metrics`: a second line of the step.

        Args:
          step: at most the last one of `metrics`, and higher than in the last call of this.
          values: scalars by name, of names that the step does not have yet.

        Raises:
          ValueError: a step that `metrics` has not had, or a value that is not a number.
        """
        if not self._enabled:
            return
        if step > self._last_step:
            raise ValueError(f"late metrics of step {step} before its own: {self._last_step} ended")
        self._append(step, values)
        if self._trackers:
            self._trackers.rows(self._last_step)

    def has_metric(self, step: int, prefix: str) -> bool:
        """Whether metrics.jsonl has a metric of a step whose name begins so."""
        if not self._enabled or not self._metrics_path.exists():
            return False
        rows = (row for row in read_metrics(self._metrics_path) if row["step"] == step)
        return any(name.startswith(prefix) for row in rows for name in row)

    def stragglers(self, step: int, report: Mapping[str, Any]) -> None:
        """Appends a step's {node: {"seconds": [P], "idle": [P], "slowest": process}}."""
        if self._enabled:
            append(self._stragglers_path, json.dumps({"step": step, "nodes": report}) + "\n")

    def samples(self, step: int | str, lines: Iterable[str]) -> None:
        """Writes samples/STEP.jsonl atomically; `lines`: records as `json_line` gives them."""
        if self._enabled:
            text = "".join(line + "\n" for line in lines)
            write_atomic(self.folder / "samples" / f"{step}.jsonl", text)

    def close(self, failed: bool = False) -> None:
        """Closes the files, writes the report, and waits for the trackers a while.

        `failed`: an error or a signal ends the run before its end.
        """
        if self._enabled:
            self._report()
            if self._trackers:
                self._trackers.close(failed)

    def _append(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: json_number(_number(name, value)) for name, value in values.items()}
        line = json.dumps({"step": step} | numbers, allow_nan=False)
        append(self._metrics_path, line + "\n")

    def _report(self) -> None:
        try:
            write_atomic(self.folder / "report.html", report(self.folder))
        except OSError as error:  # a disk's; a traceback says no more
            log.warning("report.html could not be written: %s", error)
        except Exception:
            # an error in the report must not end the run; scripts/report.py writes it again
            log.warning("report.html could not be written", exc_info=True)


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """A dict per step of a metrics.jsonl, by step, without an incomplete last line."""
    rows: dict[int | float, dict[str, Any]] = {}
    for line in complete_lines(pathlib.Path(path).read_text(encoding="utf-8")):
        row = metrics_row(line)
        rows[row["step"]] = rows.get(row["step"], {}) | row
    return [rows[step] for step in sorted(rows)]


def check_steps(path: pathlib.Path) -> None:
    """Raises ValueError for a complete line that is no JSON object with a step."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("step"), int):
            raise ValueError(
                f"{path}, line {number}: no JSON object with a step, as each line of a run has; "
                "remove the line, or choose another --workdir"
            )


def truncate_metrics(path: pathlib.Path, last_step: int) -> int:
    """Drops an incomplete last line and all steps after `last_step`, if the file exists; returns
    the number of complete lines that went."""
    if not path.exists():
        return 0
    text = path.read_text(encoding="utf-8")
    lines = complete_lines(text)
    kept = [line + "\n" for line in lines if json.loads(line)["step"] <= last_step]
    if "".join(kept) != text:
        write_atomic(path, "".join(kept))
    return len(lines) - len(kept)


def _number(name: str, value: Any) -> int | float:
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise ValueError(f"metric {name!r} must be a number, got {value!r}")
    return int(array) if array.dtype.kind in "biu" else float(array)


class RunEvents:
    """Appends events to a file; steps at most every PULSE_SECONDS."""

    def __init__(self, path: str | os.PathLike):
        self._path = pathlib.Path(path)
        self._next_pulse = 0.0
        self._end_torn_line()

    def _end_torn_line(self) -> None:
        """Ends a line that a kill cut off, so that the next event is a line of its own."""
        if not self._path.exists():
            return
        with self._path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read() not in (b"", b"\n"):
                file.write(b"\n")

    def add(self, event: str, facts: Mapping[str, Any], *, at: float | None = None) -> None:
        """Appends an event. `at`: when it happened, seconds since 1970; None: now.

        Values that JSON does not have become text.
        """
        line = {"time": round(time.time() if at is None else at, 3), "event": event, **facts}
        append(self._path, json.dumps(line, default=str) + "\n")

    def step(self, step: int) -> None:
        """Appends the end of a step, unless one was appended shortly before."""
        now = time.monotonic()
        if now >= self._next_pulse:
            self._next_pulse = now + PULSE_SECONDS
            self.add("step", {"step": step})
