"""The trackers of a run, beside it: a process for each feeds it from the run's folder.

A process starts when the run has written its config, and gets a word at its end; the run never
waits between. It has low priority and no accelerator; what its package prints goes to
FOLDER/trackers/NAME.log. It outlives a run that is killed, to store what the run has written, and
ends then within some seconds, whatever the package does.

By hand, it gives a tracker what it does not have yet of a run that has ended:

    python -P -m distflow_jax.report.trackers.sender runs/first wandb
"""

import argparse
import contextlib
import io
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
from typing import Any

from distflow_jax.report.trackers.follower import Follower, lock, state_path
from distflow_jax.report.trackers.tracker import check_trackers

LATE_SECONDS = 60.0  # without a step before a warning
HASTY_SECONDS = 5.0  # that a run waits at most which ends before its end
_ORPHAN_SECONDS = 60.0  # that a process has at least after the run is gone
_CLOSING_SECONDS = 1.0  # between the end of a process and that of its answers, at most
_MOST_WARNINGS = 8  # of a tracker

log = logging.getLogger("distflow_jax")


class Trackers:
    """All trackers of a run: `specs` as in observe.trackers; `folder`, `last_step`: see Follower.

    `close` waits at most `seconds`, at the end of a run that has made its steps.
    """

    def __init__(
        self, specs: Sequence[str], folder: pathlib.Path, *, last_step: int = -1, seconds=60.0
    ):
        self.specs, self._folder = tuple(specs), folder
        self._last_step, self._seconds = last_step, seconds
        self._senders: list[_Sender] | None = None  # before the run has written its config

    def begin(self) -> None:
        """Says that config and plan are written."""
        how = (self._folder, self._last_step, self._seconds)
        if self._senders is None:
            self._senders = [_Sender(spec, *how) for spec in self.specs]

    def rows(self, step: int) -> None:
        """Says that the metrics of `step` are written; warns of trackers that are late."""
        self.begin()
        for sender in self._senders:
            sender.expect(step)

    def close(self, failed: bool = False) -> None:
        """Says that all files are written, and waits for the trackers, at most `seconds`.

        A run that failed waits at most HASTY_SECONDS: it may be about to be killed, and others wait
        for its error. Processes that are not ready by then store the rest after it.
        """
        end = time.monotonic() + min(self._seconds, HASTY_SECONDS if failed else self._seconds)
        for sender in self._senders or ():
            sender.send("failed" if failed else "end")
        for sender in self._senders or ():
            sender.end(max(0.0, end - time.monotonic()), leave=failed)


class _Sender:
    """The process of one tracker: how far it is, and what the user has been told of it."""

    def __init__(self, spec: str, folder: pathlib.Path, last_step: int, seconds: float):
        self._spec, self._folder, self._seconds = spec, folder, seconds
        self._given = self._expected = -1
        self._since: float | None = None  # when the first step was expected that was not given
        self._told: set[str] = set()
        # -P: no module of the working directory stands before the standard library's
        command = [sys.executable, "-P", "-m", f"{__package__}.sender", str(folder), spec]
        command += ["--run", str(last_step), str(max(seconds, _ORPHAN_SECONDS))]
        # the same modules as here, and no accelerator if a user's tracker imports JAX
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._log = state_path(folder, spec).with_suffix(".log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
                text=True,
                # a signal to the run's group reaches none of the processes that a package starts
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        for message in map(json.loads, self._process.stdout):
            if "ended" in message:  # a process that a package leaves may hold the pipe's other end
                break
            if "step" in message:
                self._given = message["step"]
                self._since = None if self._given >= self._expected else time.monotonic()
            if url := message.get("url"):
                log.info("%s: %s", self._spec, url)
            if problem := message.get("problem"):
                self._warn(problem, f"{problem}; the run goes on")
        if code := self._process.wait():
            self._warn("killed", f"its process ended with code {code}; see {self._log}")

    def send(self, word: str) -> None:
        """Passes the word of the end to the process."""
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(word)

    def expect(self, step: int) -> None:
        """Notes a step that is to be given."""
        now, self._expected = time.monotonic(), step
        self._since = self._since or now
        if now - self._since > LATE_SECONDS:
            took = f"no step was taken for {LATE_SECONDS:.0f} s"
            self._warn("late", f"{took}; the run does not wait for it")

    def end(self, seconds: float, *, leave: bool) -> None:
        """Waits for the end at most so long, and kills the process then, unless it is to `leave` it
        alone; warns of steps that the tracker does not have."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            if not leave:
                setting = f"observe.tracker_seconds={self._seconds:g}"
                self._warn("killed", f"it did not end within {setting}")
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._process.returncode is not None:
            self._listener.join(_CLOSING_SECONDS)
        if self._given < self._expected:
            self._warn(
                "steps",
                f"it has {_steps_text(self._given)} of {self._expected}. To give it the rest: "
                f"python -P -m {__package__}.sender {self._folder} {self._spec}",
            )

    def _warn(self, kind: str, text: str) -> None:
        """Warns once of a kind, of a few in all."""
        if kind not in self._told and len(self._told) < _MOST_WARNINGS:
            self._told.add(kind)
            log.warning("tracker %s: %s", self._spec, text)


def main(argv: list[str] | None = None) -> int:
    """Runs the process; returns the exit code: 0, or 1 where something could not be given."""
    parser = argparse.ArgumentParser(prog="python -P -m distflow_jax.report.trackers.sender")
    parser.add_argument("folder", type=pathlib.Path, help="the run's folder")
    parser.add_argument("tracker", help="a name as in observe.trackers")
    # of a run: the step that it goes on from, and the most seconds after it is gone
    parser.add_argument("--run", nargs=2, type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    log.addHandler(logging.StreamHandler())  # tracebacks
    log.setLevel(logging.DEBUG)
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    state = state_path(args.folder, args.tracker)
    if args.run:
        threading.Thread(target=_read, args=(ends, args.run[1]), daemon=True).start()
        os.nice(10)  # the run's own threads come first
        for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when it ends
            signal.signal(number, lambda *_: None)
        answers = os.dup(1)
        os.dup2(2, 1)  # the log

        def tell(message: Mapping[str, Any]) -> None:
            with contextlib.suppress(BrokenPipeError):  # the run is gone
                os.write(answers, f"{json.dumps(message)}\n".encode())

        with lock(state, wait=True):  # the process of a killed run may not have ended yet
            Follower(args.tracker, args.folder, int(args.run[0]), tell).follow(ends)
        tell({"ended": True})
        return 0
    try:
        check_trackers([args.tracker])
        (args.folder / "metrics.jsonl").stat()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not (held := lock(state, wait=False)):
        feeds = (
            f"{state.with_suffix('.lock')} is held: a run, or this command, feeds {args.tracker}"
        )
        print(f"{feeds} already; try again when it has ended", file=sys.stderr)
        return 1
    told: dict[str, Any] = {}
    ends.put("end")
    try:
        with held:
            Follower(args.tracker, args.folder, None, told.update).follow(ends)
    except KeyboardInterrupt:
        return 130
    print(f"{args.tracker} {told.get('url', '')} has {_steps_text(told['step'])}")
    return int("problem" in told)


def _read(ends: "queue.SimpleQueue[str]", seconds: float) -> None:
    """Takes the word of the run's end, none of a kill, also while a package hangs; ends the process
    after it."""
    # unbuffered: the interpreter could not end while a thread waits in sys.stdin
    ends.put(io.FileIO(0, closefd=False).read().decode() or "lost")
    time.sleep(seconds)
    os._exit(1)


def _steps_text(step: int) -> str:
    return "no step" if step < 0 else f"the steps to {step}"


if __name__ == "__main__":
    sys.exit(main())
