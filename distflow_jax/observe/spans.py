"""Named spans of time, summed for the metrics and written as a Chrome trace.

Open trace.json in https://ui.perfetto.dev or chrome://tracing. It is an array of events in Chrome's
trace-event format, sorted by time, to which a run appends. A span is a complete event ("ph": "X")
of the thread that ran it. What waits elsewhere, while the thread does other work, is a pair of
asynchronous events ("b", "e") on a track of its own, so that spans of a thread are disjoint or
nested. `close()` closes the array; viewers and `read_trace` accept an array without its closing
bracket, as a killed run leaves it.
"""

import contextlib
import itertools
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.profiler

from distflow_jax.report.json_lines import append


class Spans:
    """Times blocks of code of one process, in any thread.

    spans = Spans("run/trace.json")
    with spans.span("gen", step=3):
        ...
    ended = spans.waiting("score")
    ended()  # later, in any thread
    spans.take()  # {"gen": 1.25, "score": 0.5}: seconds since the last call, summed by name

    A span inside another one counts in both. Without a path only the sums are kept.
    """

    def __init__(self, path: str | os.PathLike | None = None, *, process_index: int = 0):
        self._process_index = process_index
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._numbers = itertools.count()
        self._running: dict[int, int] = {}  # number of a span -> its start in us
        self._events: list[tuple[int, int, dict[str, Any]]] = []  # us, number, event
        self._thread_names: dict[int, str] = {}
        # the wall clock aligns several processes and a resumed run; durations stay monotonic
        self._anchor_ns = time.time_ns() - time.perf_counter_ns()
        self._path = None if path is None else pathlib.Path(path)
        if self._path is not None:
            _reopen(self._path)
            self._describe("process_name", 0, next(self._numbers), f"process {process_index}")

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Times its body under `name`; the viewer shows `args` (JSON values).

        The span is also in the trace of JAX's profiler if that runs (observe/profile.py).
        """
        start, number = self._start()
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self._end(name, start, number, args)

    def waiting(self, name: str, **args: Any) -> Callable[[], None]:
        """Starts a time under `name` that no thread spends; the result, called once, ends it."""
        with self._lock:
            start, number = time.perf_counter_ns(), next(self._numbers)
            # unlike those of an earlier start, which may have been killed before the end
            track = {"cat": "waiting", "id": f"{self._us(start):x}.{number}"}
            self._add(start, number, name, "b", args=args, **track)

        def ended() -> None:
            with self._lock:
                end = time.perf_counter_ns()
                self._count(name, end - start)
                self._add(end, next(self._numbers), name, "e", **track)

        return ended

    def _start(self) -> tuple[int, int]:
        """(time in ns, number) of a span that starts. Within the lock times rise, as in a file."""
        with self._lock:
            start, number = time.perf_counter_ns(), next(self._numbers)
            if self._path is not None:
                thread = threading.current_thread()
                # the system may give an ended thread's number to the next
                if self._thread_names.get(thread.native_id) != thread.name:
                    self._thread_names[thread.native_id] = thread.name
                    self._describe("thread_name", self._us(start), number, thread.name)
                self._running[number] = self._us(start)
        return start, number

    def _end(self, name: str, start: int, number: int, args: dict[str, Any]) -> None:
        with self._lock:
            end = time.perf_counter_ns()
            self._count(name, end - start)
            self._running.pop(number, None)
            # whole microseconds, Chrome's unit: rounding down keeps spans nested
            dur = self._us(end) - self._us(start)
            self._add(start, number, name, "X", dur=dur, args=args)

    def _us(self, time_ns: int) -> int:
        return (self._anchor_ns + time_ns) // 1000

    def _count(self, name: str, ns: int) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + ns / 1e9

    def _add(self, time_ns: int, number: int, name: str, kind: str, **rest: Any) -> None:
        if self._path is None:
            return
        event = {
            "name": name,
            "ph": kind,
            "pid": self._process_index,
            "tid": threading.get_native_id(),
            "ts": self._us(time_ns),
            **rest,
        }
        self._events.append((event["ts"], number, event))

    def _describe(self, what: str, time_us: int, number: int, name: str) -> None:
        event = {"name": what, "ph": "M", "pid": self._process_index}
        event |= {"tid": threading.get_native_id(), "args": {"name": name}}
        self._events.append((time_us, number, event))

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Appends events to the trace, up to the start of the
        first span that still runs."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
            first = min(((us, number) for number, us in self._running.items()), default=None)
            self._flush(first)
        return seconds

    def _flush(self, before: tuple[int, int] | None) -> None:
        if self._path is None or not self._events:
            return
        # a name precedes the span for which it was noted
        self._events.sort(key=lambda item: (item[0], item[1], item[2]["ph"] != "M"))
        ready = [item for item in self._events if before is None or item[:2] < before]
        self._events = self._events[len(ready) :]
        append(self._path, "".join(json.dumps(event) + ",\n" for _, _, event in ready))

    def close(self) -> None:
        """Appends the last events and closes the array; the file is then plain JSON."""
        with self._lock:
            self._flush(None)
            if self._path is None:
                return
            with self._path.open("rb+") as file:
                if file.seek(-2, os.SEEK_END) and file.read() == b",\n":
                    file.seek(-2, os.SEEK_END)
                file.write(b"\n]\n")
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
