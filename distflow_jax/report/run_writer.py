"""Writer of a run's folder.

It contains config.json, plan.{txt,svg,json}, memory.json, metrics.jsonl, stragglers.jsonl,
events.jsonl, tensorboard/, samples/ and report.html. metrics.jsonl has one JSON object per step
with "step" and the metrics by name. Floats have as many digits as give the same float64 again. JSON
has no NaN or infinity: they are the strings "NaN", "Infinity" and "-Infinity", which `read_metrics`
converts.
"""

import json
import logging
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorboardX

from distflow_jax.report.page import report
from distflow_jax.report.run_events import RunEvents

NON_FINITE = ("NaN", "Infinity", "-Infinity")

log = logging.getLogger("distflow_jax")


class RunWriter:
    """Writes the files of one run. Only one process is `enabled`; all others write nothing.

    Args:
      folder: the run's folder.
      enabled: whether this process writes.
      resume_step: step of the checkpoint from which the run continues; None for a new run. Output
        of later steps, by an earlier interrupted run, is dropped, so that each step appears once.
        To lose no step, write its metrics before its checkpoint is saved.
      report_every: steps between updates of report.html; 0: only at the end.

    Raises:
      ValueError: the folder is in an object store, which cannot append to files.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        enabled: bool = True,
        resume_step: int | None = None,
        report_every: int = 0,
    ):
        self._enabled = enabled
        self._report_every = report_every
        self._last_step = -1 if resume_step is None else resume_step
        if "://" in str(folder):
            raise ValueError(
                "the run's folder must be on a file system, since metrics are appended to a file; "
                f"got {str(folder)!r}"
            )
        self.folder = pathlib.Path(folder)
        if not enabled:
            return
        (self.folder / "samples").mkdir(parents=True, exist_ok=True)
        self._metrics_path = self.folder / "metrics.jsonl"
        truncate_metrics(self._metrics_path, self._last_step)
        self._stragglers_path = self.folder / "stragglers.jsonl"
        truncate_metrics(self._stragglers_path, self._last_step)
        for path in (self.folder / "samples").glob("*.jsonl"):
            if path.stem.isdigit() and int(path.stem) > self._last_step:
                path.unlink()
        self._events = RunEvents(self.folder / "events.jsonl")
        self._file = self._metrics_path.open("a", encoding="utf-8")
        self._tensorboard = tensorboardX.SummaryWriter(
            str(self.folder / "tensorboard"), purge_step=self._last_step + 1, flush_secs=10
        )

    def config(self, config: Mapping[str, Any]) -> None:
        """Writes config.json. `config` is a nested mapping with JSON values."""
        if self._enabled:
            text = json.dumps(config, indent=2, allow_nan=False)
            write_atomic(self.folder / "config.json", text + "\n")

    def plan(self, text: str, *, svg: str = "", tree: str = "") -> None:
        """Writes plan.txt and, if given, plan.svg and plan.json."""
        for name, content in (("plan.txt", text), ("plan.svg", svg), ("plan.json", tree)):
            if self._enabled and content:
                write_atomic(self.folder / name, content.rstrip() + "\n")

    def memory(self, tree: Mapping[str, Any]) -> None:
        """Writes memory.json: the memory of the devices, as JSON values."""
        if self._enabled:
            write_atomic(self.folder / "memory.json", json.dumps(tree, indent=1) + "\n")

    def event(self, kind: str, facts: Mapping[str, Any], *, at: float | None = None) -> None:
        """Appends an event to events.jsonl, see RunEvents.add."""
        if self._enabled:
            self._events.add(kind, facts, at=at)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends the metrics of one step to metrics.jsonl and TensorBoard.

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
        values = {name: _number(name, value) for name, value in values.items()}
        line = {"step": step} | {name: _json_number(value) for name, value in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()  # a SIGKILL then loses nothing
        self._last_step = step
        self._events.step(step)
        for name, value in values.items():
            # TensorBoard allows no @: mean@8 becomes mean_8
            self._tensorboard.add_scalar(name.replace("@", "_"), value, step)
        self._tensorboard.flush()
        if self._report_every and step and step % self._report_every == 0:
            self._report()

    def stragglers(self, step: int, report: Mapping[str, Any]) -> None:
        """Appends a step's {node: {"seconds": [P], "idle": [P], "slowest": process}}."""
        if self._enabled:
            with self._stragglers_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "nodes": report}) + "\n")

    def samples(self, step: int | str, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes samples/STEP.jsonl, one record per line, atomically."""
        if self._enabled:
            lines = [json.dumps(_json_value(record), ensure_ascii=False) for record in records]
            text = "".join(line + "\n" for line in lines)
            write_atomic(self.folder / "samples" / f"{step}.jsonl", text)

    def close(self) -> None:
        """Flushes and closes the files, and writes the report."""
        if self._enabled:
            self._file.close()
            self._tensorboard.close()
            self._report()

    def _report(self) -> None:
        try:
            write_atomic(self.folder / "report.html", report(self.folder))
        except Exception:
            # an error in the report must not end the run; scripts/report.py writes it again
            log.warning("report.html could not be written", exc_info=True)


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl as dicts, without an incomplete last line."""
    rows = []
    for line in _complete_lines(pathlib.Path(path).read_text(encoding="utf-8")):
        row = json.loads(line)
        rows.append({k: float(v) if v in NON_FINITE else v for k, v in row.items()})
    return rows


def truncate_metrics(path: pathlib.Path, last_step: int) -> None:
    """Drops an incomplete last line and all steps after `last_step`, if the file exists."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    lines = _complete_lines(text)
    kept = "".join(line + "\n" for line in lines if json.loads(line)["step"] <= last_step)
    if kept != text:
        write_atomic(path, kept)


def _complete_lines(text: str) -> list[str]:
    *lines, torn = text.split("\n")
    return lines


def write_atomic(path: str | os.PathLike, text: str) -> None:
    """Writes a text file atomically: after a crash it has the old content or the new."""
    path = pathlib.Path(path)
    scratch = path.with_name(f".{path.name}.tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # without it a power failure could leave an empty file
    os.replace(scratch, path)


def _number(name: str, value: Any) -> int | float:
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise ValueError(f"metric {name!r} must be a number, got {value!r}")
    return int(array) if array.dtype.kind in "biu" else float(array)


def _json_number(value: int | float) -> int | float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _json_value(value: Any) -> Any:
    """Records as JSON values: NumPy arrays are lists, numbers and NaN are as in metrics."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _json_value(value.tolist())
    if isinstance(value, float):
        return _json_number(value)
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)
