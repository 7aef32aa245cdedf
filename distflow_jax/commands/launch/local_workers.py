"""Workers on this machine, beside the processes of a run that they sample for."""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from distflow_jax.parsing.paths import named_path

DOORS = "doors.json"  # of a run's folder: where the trainers answer
LOOK_SECONDS = 0.2
LEAVE_SECONDS = 10.0  # after the run for workers to end by themselves, and again after SIGTERM


class LocalWorkers:
    """Workers that begin as soon as the trainers answer, and end after them.

    One that ends before is named; the run goes on.
    """

    def __init__(
        self,
        command: list[str],
        count: int,
        start: Callable[[str, list[str]], subprocess.Popen],
        say: Callable[[str], None],
    ):
        """`start(label, command)`: starts a process. Create this before the trainers."""
        self._command, self._count, self._start, self._say = command, count, start, say
        self._doors = named_path("--workdir", command[-1].partition("=")[2]) / DOORS
        self._before = self._read()
        self._workers: list[subprocess.Popen] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self, *, finished: bool) -> None:
        """Ends the workers; after a run that is `finished` they have a moment to end themselves."""
        self._closing.set()
        self._thread.join()
        if finished:
            self._wait()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for worker in self._workers:
                if worker.poll() is None:
                    worker.send_signal(number)
            self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + LEAVE_SECONDS
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, end - time.monotonic()))

    def _watch(self) -> None:
        while self._read() == self._before and not self._closing.wait(LOOK_SECONDS):
            pass
        if not self._closing.is_set():
            names = [f"w{i}" for i in range(self._count)]
            self._workers += [self._start(name, self._command) for name in names]
        told: set[int] = set()
        while not self._closing.wait(LOOK_SECONDS):
            for index, worker in enumerate(self._workers):
                if worker.poll() and index not in told:
                    told.add(index)
                    self._say(f"worker {index} ended with exit code {worker.returncode}")

    def _read(self) -> str:
        try:
            return self._doors.read_text()
        except OSError:
            return ""
