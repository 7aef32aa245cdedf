"""The trackers of a run, beside it: a thread for TensorBoard, a process for each of the others.

The run only sends words, which takes microseconds and never waits: see Follower.
"""

import contextlib
import json
import logging
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from distflow_jax.report.trackers.follower import Follower
from distflow_jax.report.trackers.tracker import file_name

LATE_SECONDS = 60.0  # without a step before a warning
_MOST_WARNINGS = 8  # of a tracker

log = logging.getLogger("distflow_jax")


class Trackers:
    """All trackers of a run.

    Args:
      specs: their names, as in observe.trackers.
      folder: the run's folder, which the trackers follow.
      project: observe.tracker_project.
      last_step: step that the run goes on from; -1: of an earlier start nothing is kept.
      seconds: that `close` waits at most.
    """

    def __init__(
        self,
        specs: Sequence[str],
        folder: pathlib.Path,
        *,
        project: str = "",
        last_step: int = -1,
        seconds: float = 60.0,
    ):
        self._seconds = seconds
        kinds = {"tensorboard": _Thread}
        self._workers = [
            kinds.get(spec, _Process)(_Status(spec, folder), project, last_step) for spec in specs
        ]

    def begin(self) -> None:
        """Says that config and plan are written."""
        self._send("begin")

    def rows(self, step: int) -> None:
        """Says that the metrics of `step` are written; warns of trackers that are late."""
        for worker in self._workers:
            worker.status.expect(step)
        self._send("rows")

    def close(self) -> None:
        """Says that all files are written, and waits for the trackers, at most `seconds`."""
        self._send("end")
        deadline = time.monotonic() + self._seconds
        for worker in self._workers:
            ended = worker.wait(max(0.0, deadline - time.monotonic()))
            worker.status.end(ended, self._seconds)

    def _send(self, word: str) -> None:
        for worker in self._workers:
            worker.send(word)


class _Worker(Protocol):
    """Feeds one tracker."""

    status: "_Status"

    def send(self, word: str) -> None:
        """Passes a word to the follower, without waiting."""

    def wait(self, seconds: float) -> bool:
        """Waits for the end; False where it did not come, and the worker was given up."""


class _Status:
    """How far a tracker is, and what the user has been told of it."""

    def __init__(self, spec: str, folder: pathlib.Path):
        self.spec, self.folder = spec, folder
        self._lock = threading.Lock()
        self._given = self._expected = -1
        self._since: float | None = None  # when the first step was expected that was not given
        self._told: set[str] = set()

    def answer(self, message: Mapping[str, Any]) -> None:
        """Takes what a follower tells."""
        if "step" in message:
            with self._lock:
                self._given = message["step"]
                self._since = None if self._given >= self._expected else time.monotonic()
        if trace := message.get("trace"):
            log.debug("tracker %s: %s", self.spec, trace)
        if url := message.get("url"):
            log.info("%s: %s", self.spec, url)
        if problem := message.get("problem"):
            self.warn(problem, f"{problem}; the run goes on")

    def expect(self, step: int) -> None:
        """Notes a step that is to be given."""
        with self._lock:
            self._expected = step
            late = self._since is not None and time.monotonic() - self._since > LATE_SECONDS
            self._since = self._since or time.monotonic()
        if late:
            self.warn(
                "late", f"no step was taken for {LATE_SECONDS:.0f} s; the run does not wait for it"
            )

    def end(self, ended: bool, seconds: float) -> None:
        """Warns of steps that the tracker does not have."""
        if not ended:
            self.warn("end", f"it did not end within observe.tracker_seconds={seconds:g}")
        if self._given < self._expected:
            self.warn(
                "steps",
                f"it has the steps to {self._given} of {self._expected}. To give it the rest: "
                f"python -m {__package__}.sender {self.folder} {self.spec}",
            )

    def warn(self, kind: str, text: str) -> None:
        """Warns once of a kind, of a few in all."""
        if kind not in self._told and len(self._told) < _MOST_WARNINGS:
            self._told.add(kind)
            log.warning("tracker %s: %s", self.spec, text)


class _Thread:
    """A follower in a thread of the run: for what only writes files."""

    def __init__(self, status: _Status, project: str, last_step: int):
        self.status = status
        self._words: queue.Queue[str] = queue.Queue(maxsize=1000)
        follower = Follower(status.spec, status.folder, project, last_step, status.answer)
        self._thread = threading.Thread(
            target=self._run, args=(follower,), name=f"tracker {status.spec}", daemon=True
        )
        self._thread.start()

    def _run(self, follower: Follower) -> None:
        word = ""
        while word != "end":
            word = self._words.get()
            follower.command(word)

    def send(self, word: str) -> None:
        """Passes a word; one that finds the queue full is implied by those in it."""
        with contextlib.suppress(queue.Full):
            self._words.put_nowait(word)

    def wait(self, seconds: float) -> bool:
        """Waits for the thread; one that hangs ends with the process."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


class _Process:
    """A follower in a process of its own: what a package does there costs the run nothing."""

    def __init__(self, status: _Status, project: str, last_step: int):
        self.status = status
        command = [sys.executable, "-m", f"{__package__}.sender", str(status.folder), status.spec]
        command += [f"--project={project}", f"--last-step={last_step}", "--commands"]
        # the same modules as here, and no accelerator if a user's tracker imports JAX
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        self._log = status.folder / "trackers" / f"{file_name(status.spec)}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                # a signal to the run's group reaches none of the processes that a package starts
                start_new_session=True,
            )
        os.set_blocking(self._process.stdin.fileno(), False)
        self._answers = threading.Thread(target=self._listen, daemon=True)
        self._answers.start()

    def _listen(self) -> None:
        for line in self._process.stdout:
            self.status.answer(json.loads(line))

    def send(self, word: str) -> None:
        """Passes a word; one that finds the pipe full is implied by those in it."""
        try:
            os.write(self._process.stdin.fileno(), f"{word}\n".encode())
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._check_death()

    def wait(self, seconds: float) -> bool:
        """Waits for the process; kills one that does not end."""
        self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return False
        self._answers.join(seconds)
        self._process.stdout.close()
        self._check_death()
        return True

    def _check_death(self) -> None:
        if code := self._process.poll():
            self.status.warn("death", f"its process ended with code {code}; see {self._log}")
