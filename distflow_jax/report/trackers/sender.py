"""The trackers of a run, beside it: a process for each feeds it from the run's folder.

A process starts when the run has written its config, and gets a word at its end; the run never
waits between, and reads in the tracker's state how far it is. It has low priority and no
accelerator; what its package prints goes to FOLDER/trackers/NAME.log. It outlives a run that is
killed, to store what the run has written, and ends then within some seconds, whatever the package
does.

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
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from distflow_jax.parsing.bounded_child import module_path
from distflow_jax.report.trackers.follower import Follower, lock, state_path
from distflow_jax.report.trackers.tracker import check_trackers

LATE_SECONDS = 60.0  # without a step before a warning
HASTY_SECONDS = 5.0  # that a run waits at most which ends before its end
_ORPHAN_SECONDS = 60.0  # that a process has at least after the run is gone

log = logging.getLogger("distflow_jax")


class Trackers:
    """All trackers of a run: `specs` as in observe.trackers; `folder`: of the run.

    `close` waits at most `seconds`, at the end of a run that has made its steps.
    """

    def __init__(self, specs: Sequence[str], folder: pathlib.Path, *, seconds: float = 60.0):
        self._specs, self._folder, self._seconds = tuple(specs), folder, seconds
        self._token = secrets.token_hex(8)  # in states that belong to this start of the run
        self._processes: dict[str, subprocess.Popen] = {}  # once the run has written its config
        self._expected = -1  # the last step of the run
        self._seen: dict[str, tuple[int, float]] = {}  # the last step given, and since when
        self._told: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Says that config and plan are written."""
        for spec in self._specs:
            if spec not in self._processes:
                seconds = max(self._seconds, _ORPHAN_SECONDS)
                self._processes[spec] = _started(spec, self._folder, self._token, seconds)

    def rows(self, step: int) -> None:
        """Says that the metrics of `step` are written; warns of trackers that are late."""
        self.begin()
        now = time.monotonic()
        for spec in self._specs:
            given = self._look(spec)
            before, since = self._seen.get(spec, (given, now))
            if given != before or given >= self._expected:
                since = now
            self._seen[spec] = given, since
            if now - since > LATE_SECONDS:
                took = f"no step was taken for {LATE_SECONDS:.0f} s"
                self._warn(spec, "late", f"{took}; the run does not wait for it")
        self._expected = step

    def close(self, failed: bool = False) -> None:
        """Says that all files are written, and waits for the trackers, at most `seconds`.

        A run that failed waits at most HASTY_SECONDS: it may be about to be killed, and others wait
        for its error. Processes that are not ready by then store the rest after it.
        """
        end = time.monotonic() + min(self._seconds, HASTY_SECONDS if failed else self._seconds)
        for process in self._processes.values():
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write("failed" if failed else "end")
        for spec, process in self._processes.items():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                if not failed:
                    setting = f"observe.tracker_seconds={self._seconds:g}"
                    self._warn(spec, "end", f"it did not end within {setting}")
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if (given := self._look(spec)) < self._expected:
                self._warn(
                    spec,
                    "steps",
                    f"it has {_steps_text(given)} of {self._expected}. To give it the rest: "
                    f"python -P -m {__package__}.sender {self._folder} {spec}",
                )

    def _look(self, spec: str) -> int:
        """The last step that a tracker has been given; tells the user what else its state says."""
        path = state_path(self._folder, spec)
        if code := self._processes[spec].poll():
            log_path = path.with_suffix(".log")
            self._warn(spec, "end", f"its process ended with code {code}; see {log_path}")
        state = {}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.get("reader") != self._token:
            return -1
        if (url := state["url"]) and (spec, url) not in self._told:
            self._told.add((spec, url))
            log.info("%s: %s", spec, url)
        for problem in state["problems"]:
            self._warn(spec, problem, f"{problem}; the run goes on")
        return state["given"]

    def _warn(self, spec: str, kind: str, text: str) -> None:
        """Warns once of a kind."""
        if (spec, kind) not in self._told:
            self._told.add((spec, kind))
            log.warning("tracker %s: %s", spec, text)


def _started(spec: str, folder: pathlib.Path, token: str, seconds: float) -> subprocess.Popen:
    """The process of a tracker; its standard input takes the word of the end."""
    # -P: no module of the working directory stands before the standard library's
    command = [sys.executable, "-P", "-m", f"{__package__}.sender", str(folder), spec]
    output = state_path(folder, spec).with_suffix(".log")
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as file:
        return subprocess.Popen(
            [*command, "--run", token, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            # no accelerator if a user's tracker imports JAX
            env=os.environ | {"PYTHONPATH": module_path(), "JAX_PLATFORMS": "cpu"},
            text=True,
            # a signal to the run's group reaches none of the processes that a package starts
            start_new_session=True,
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the process; returns the exit code: 0, or 1 where something could not be given."""
    parser = argparse.ArgumentParser(prog="python -P -m distflow_jax.report.trackers.sender")
    parser.add_argument("folder", type=pathlib.Path, help="the run's folder")
    parser.add_argument("tracker", help="a name as in observe.trackers")
    # of a run: its token, and the most seconds after it is gone
    parser.add_argument("--run", nargs=2, default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    log.addHandler(logging.StreamHandler())  # tracebacks
    log.setLevel(logging.DEBUG)
    failed: Future[bool] = Future()
    if args.run:
        threading.Thread(target=_await_end, args=(failed, float(args.run[1])), daemon=True).start()
        os.nice(10)  # the run's own threads come first
        for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when it ends
            signal.signal(number, lambda *_: None)
    else:
        failed.set_result(False)
        try:
            check_trackers([args.tracker])
            (args.folder / "metrics.jsonl").stat()
        except (OSError, ValueError) as error:
            parser.error(str(error))
    path = state_path(args.folder, args.tracker)
    # a run waits: the process of a killed one may not have ended yet
    if not (held := lock(path, wait=bool(args.run))):
        feeds = f"{path.with_suffix('.lock')} is held: a run, or this command, feeds {args.tracker}"
        print(f"{feeds} already; try again when it has ended", file=sys.stderr)
        return 1
    with held:
        follower = Follower(args.tracker, args.folder, "".join(args.run[:1]))
        try:
            follower.follow(failed)
        except KeyboardInterrupt:
            return 130
    state = follower.state
    print(f"{args.tracker} {state.url} has {_steps_text(state.given)}")
    return int(bool(state.problems) and not args.run)


def _await_end(failed: Future[bool], seconds: float) -> None:
    """Takes the word of the run's end, none of a kill, also while a package hangs; ends the process
    after it."""
    # unbuffered: the interpreter could not end while a thread waits in sys.stdin
    failed.set_result(io.FileIO(0, closefd=False).read() != b"end")
    time.sleep(seconds)
    os._exit(1)


def _steps_text(step: int) -> str:
    return "no step" if step < 0 else f"the steps to {step}"


if __name__ == "__main__":
    sys.exit(main())
