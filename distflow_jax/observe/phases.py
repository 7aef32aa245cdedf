"""Phases of a process's main thread: spans, progress for the watchdog, seconds of work."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distflow_jax.observe.spans import Spans
from distflow_jax.watchdog.controller import Watchdog


class Phases:
    """Times the nodes of a plan, and reports each to the watchdog.

    Only for the main thread, and for phases that every process goes through in the same order: the
    watchdogs compare the processes' counts of phases.
    """

    def __init__(
        self,
        spans: Spans,
        watchdog: Watchdog,
        waited: Callable[[], float],
        shown: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        """`waited()`: seconds spent so far in collectives among hosts, waiting included.

        `shown(name)`: a block in which a terminal shows that the phase runs.
        """
        self._spans, self._watchdog, self._waited, self._shown = spans, watchdog, waited, shown
        self._work: dict[str, float] = {}
        self._open: list[str] = []  # phases that run, the outermost first
        self.step = 0  # the running step

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Times its body under `name`."""
        self._watchdog.progress(self.step, name)
        self._open.append(name)
        try:
            with (
                self._shown(name),
                self._timed(name),
                self._spans.span(name, step=self.step, **args),
            ):
                yield
        finally:
            self._open.pop()
            self._watchdog.progress(self.step, self._open[-1] if self._open else f"after {name}")

    def note(self, what: str) -> None:
        """Tells the watchdog what the running phase waits for; this is no progress."""
        self._watchdog.note(what)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Counts its body's seconds as work, less those in collectives."""
        start, waited = time.perf_counter(), self._waited()
        try:
            yield
        finally:
            work = time.perf_counter() - start - (self._waited() - waited)
            self._work[name] = self._work.get(name, 0.0) + work

    def take_work(self) -> dict[str, float]:
        """Seconds of work by name since the last call: spans less the time in collectives."""
        work, self._work = self._work, {}
        return work


def straggler_report(names: Sequence[str], seconds: np.ndarray) -> dict[str, dict[str, Any]]:
    """Slowest process of each node: {node: {"seconds": [P], "idle": [P], "slowest": process}}.

    `names` are the nodes; `seconds` [P, nodes] is each process's work. A process's idle share of a
    node is 1 - its seconds / the slowest process's seconds.
    """
    report = {}
    for name, work in zip(names, np.asarray(seconds).T, strict=True):
        most = max(float(work.max()), 1e-9)
        report[name] = {
            "seconds": [round(float(s), 6) for s in work],
            "idle": [round(1 - float(s) / most, 4) for s in work],
            "slowest": int(work.argmax()),
        }
    return report
