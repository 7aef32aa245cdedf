"""Named spans of time, summed for the metrics and written as a Chrome trace.

Open trace.json in https://ui.perfetto.dev or chrome://tracing. It is an array of complete events
("ph": "X"), in Chrome's trace-event format, to which a run appends. `close()` closes the array;
viewers and `read_trace` accept an array without its closing bracket, as a killed run leaves it.
"""

import contextlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax.profiler


class Spans:
    """Times blocks of code of one process, in any thread.

    spans = Spans("run/trace.json")
    with spans.span("gen", step=3):
        ...
    spans.take()  # {"gen": 1.25}: seconds since the last call, summed by name

    A span inside another one counts in both. Without a path only the sums are kept.
    """

    def __init__(self, path: str | os.PathLike | None = None, *, process_index: int = 0):
        self._process_index = process_index
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._events: list[dict[str, Any]] = []
        self._named_threads: set[int] = set()
        # the wall clock aligns several processes and a resumed run; durations stay monotonic
        self._anchor_ns = time.time_ns() - time.perf_counter_ns()
        self._path = None if path is None else pathlib.Path(path)
        if self._path is not None:
            _reopen(self._path)
            self._add_event("process_name", "M", args={"name": f"process {process_index}"})

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Times its body under `name`; the viewer shows `args` (JSON values).

        The span is also in the trace of JAX's profiler if that runs (observe/profile.py).
        """
        start = time.perf_counter_ns()
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self.add(name, start, time.perf_counter_ns(), **args)

    def add(self, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Records a span measured elsewhere, with two readings of `time.perf_counter_ns`."""
        with self._lock:
            seconds = (end_ns - start_ns) / 1e9
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._path is None:
                return
            thread = threading.current_thread()
            if thread.native_id not in self._named_threads:
                self._named_threads.add(thread.native_id)
                self._add_event("thread_name", "M", args={"name": thread.name})
            # Chrome's unit is the microsecond
            start_us = (self._anchor_ns + start_ns) / 1e3
            self._add_event(name, "X", ts=start_us, dur=(end_ns - start_ns) / 1e3, args=args)

    def _add_event(self, name: str, kind: str, **rest: Any) -> None:
        thread_id = threading.get_native_id()
        event = {"name": name, "ph": kind, "pid": self._process_index, "tid": thread_id, **rest}
        self._events.append(event)

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Appends the collected events to the trace."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
            self._flush()
        return seconds

    def _flush(self) -> None:
        if self._path is None or not self._events:
            return
        lines = "".join(json.dumps(event) + ",\n" for event in self._events)
        self._events = []
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)

    def close(self) -> None:
        """Appends the last events and closes the array; the file is then plain JSON."""
        with self._lock:
            self._flush()
            if self._path is None:
                return
            text = self._path.read_text(encoding="utf-8")
            self._path.write_text(text.rstrip().rstrip(",") + "\n]\n", encoding="utf-8")
            self._path = None


def read_trace(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Events of a trace file, closed or not, without an incomplete last line."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    events = []
    for line in text.strip().removeprefix("[").removesuffix("]").strip().splitlines():
        line = line.rstrip(",")
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return events


def _reopen(path: pathlib.Path) -> None:
    """Rewrites `path` as an open array: "[", then complete lines that end in a comma."""
    path.parent.mkdir(parents=True, exist_ok=True)
    events = read_trace(path) if path.exists() else []
    lines = "".join(json.dumps(event) + ",\n" for event in events)
    scratch = path.with_suffix(".tmp")
    scratch.write_text("[\n" + lines, encoding="utf-8")
    os.replace(scratch, path)
