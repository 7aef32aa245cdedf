"""The trackers of a run, beside it: a thread for TensorBoard, a process for each of the others.

The run only sends words, which takes microseconds and never waits: see Follower.
"""

import json
import logging
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.report.trackers.follower import LAST_WORDS, Follower, Words
from distflow_jax.report.trackers.sender import ORPHAN_SECONDS, steps_text
from distflow_jax.report.trackers.tracker_state import cut_states, held, state_path

LATE_SECONDS = 60.0  # without a step before a warning
HASTY_SECONDS = 5.0  # that a run waits at most which ends before its end
_CLOSING_SECONDS = 1.0  # between the end of a process and that of its output
_MOST_WARNINGS = 8  # of a tracker

log = logging.getLogger("distflow_jax")


class Trackers:
    """All trackers of a run.

    Args:
      specs: their names, as in observe.trackers.
      folder: the run's folder, which the trackers follow.
      project: observe.tracker_project.
      last_step: step that the run goes on from; -1: of an earlier start nothing is kept.
      seconds: that `close` waits at most, at the end of a run that has made its steps.
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
        self._folder, self._specs, self._seconds = folder, tuple(specs), seconds
        self._workers: list[_Thread | _Process] = []
        for spec in specs:
            status = _Status(spec, folder)
            if spec == "tensorboard":
                self._workers.append(_Thread(status, project, last_step))
            else:
                self._workers.append(_Process(status, project, last_step, seconds))

    def cut(self, last_step: int) -> None:
        """Says that the run drops the steps after `last_step`; -1: all of an earlier start."""
        cut_states(self._folder, last_step, self._specs)

    def begin(self) -> None:
        """Says that config and plan are written."""
        self._send("begin")

    def rows(self, step: int) -> None:
        """Says that the metrics of `step` are written; warns of trackers that are late."""
        for worker in self._workers:
            worker.status.expect(step)
        self._send("rows")

    def close(self, failed: bool = False) -> None:
        """Says that all files are written, and waits for the trackers, at most `seconds`.

        A run that failed waits at most HASTY_SECONDS: it may be about to be killed, and others wait
        for its error. Processes of trackers that are not ready by then store the rest after it.
        """
        self._send("failed" if failed else "end")
        deadline = time.monotonic() + self._seconds
        hasty = time.monotonic() + HASTY_SECONDS
        for worker in self._workers:
            ended = worker.wait(min(deadline, hasty) if failed else deadline, leave=failed)
            worker.status.end(ended, self._seconds, left=failed)

    def _send(self, word: str) -> None:
        for worker in self._workers:
            worker.send(word)


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

    def end(self, ended: bool, seconds: float, *, left: bool) -> None:
        """Warns of steps that the tracker does not have."""
        if not ended and not left:
            self.warn("end", f"it did not end within observe.tracker_seconds={seconds:g}")
        if self._given < self._expected:
            self.warn(
                "steps",
                f"it has {steps_text(self._given)} of {self._expected}. To give it the rest: "
                f"python -P -m {__package__}.sender {self.folder} {self.spec}",
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
        self._words = Words()
        self._thread = threading.Thread(
            target=self._run, args=(project, last_step), name=f"tracker {status.spec}", daemon=True
        )
        self._thread.start()

    def _run(self, project: str, last_step: int) -> None:
        spec, folder = self.status.spec, self.status.folder
        with held(state_path(folder, spec), wait=True):
            follower = Follower(spec, folder, project, last_step, self.status.answer)
            for word in self._words:
                follower.command(word)

    def send(self, word: str) -> None:
        """Passes a word."""
        self._words.put(word)

    def wait(self, deadline: float, *, leave: bool) -> bool:
        """Waits for the thread until `deadline`, a time of time.monotonic(); returns whether it has
        ended. One that hangs ends with the process."""
        self._thread.join(_left(deadline))
        return not self._thread.is_alive()


class _Process:
    """A follower in a process of its own: what a package does there costs the run nothing."""

    def __init__(self, status: _Status, project: str, last_step: int, seconds: float):
        self.status = status
        # -P: no module of the working directory stands before the standard library's
        command = [sys.executable, "-P", "-m", f"{__package__}.sender"]
        command += [str(status.folder), status.spec, f"--project={project}", "--commands"]
        command += [f"--last-step={last_step}", f"--seconds={max(seconds, ORPHAN_SECONDS)}"]
        # the same modules as here, and no accelerator if a user's tracker imports JAX
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        self._log = state_path(status.folder, status.spec).with_suffix(".log")
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
        self._unsent = ""
        self._answers = threading.Thread(target=self._listen, daemon=True)
        self._answers.start()

    def _listen(self) -> None:
        # the pipe is this thread's alone: a process that a package leaves may hold its other end
        with self._process.stdout as lines:
            for line in lines:
                self.status.answer(json.loads(line))
        self._process.wait()

    def send(self, word: str) -> None:
        """Passes a word; one that finds the pipe full is implied by those in it, but a last one."""
        try:
            os.write(self._process.stdin.fileno(), f"{word}\n".encode())
        except BlockingIOError:
            self._unsent = word if word in LAST_WORDS else ""
        except BrokenPipeError:
            self._check_death()

    def wait(self, deadline: float, *, leave: bool) -> bool:
        """As of _Thread. Kills a process that does not end, unless it is to `leave` it alone."""
        if self._unsent:
            pipe = select.poll()
            pipe.register(self._process.stdin, select.POLLOUT)
            pipe.poll(1000 * _left(deadline))
            self.send(self._unsent)
        self._process.stdin.close()
        ended = True
        try:
            self._process.wait(_left(deadline))
        except subprocess.TimeoutExpired:
            if leave:
                return False
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            ended = False
        self._answers.join(min(_CLOSING_SECONDS, max(_left(deadline), 0.1)))
        if ended:
            self._check_death()
        return ended

    def _check_death(self) -> None:
        if code := self._process.poll():
            self.status.warn("death", f"its process ended with code {code}; see {self._log}")


def _left(deadline: float) -> float:
    """Seconds until a time of time.monotonic()."""
    return max(0.0, deadline - time.monotonic())
