"""The log of a run's events, events.jsonl: starts, steps, evaluations, checkpoints, stops.

One JSON object a line: {"time": seconds since 1970, "event": kind, ...}. A run that is resumed
appends to it, so that it holds every start of the run with its provenance, and every stop.
"""

import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from distflow_jax.report.json_lines import append

PULSE_SECONDS = 30.0  # between two events of steps


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
