"""The trackers of a run, beside it: a process for each feeds it from the run's folder.

metrics.jsonl is the queue. A process gives the rows that trackers/NAME.rows does not name yet, and
writes to trackers/NAME.json how far it is, which the run reads; the run sends one word, at its end.
The process holds the lock trackers/NAME.lock; what its package prints goes to trackers/NAME.log. It
outlives a run that is killed, to store what the run has written, and ends then within some seconds,
whatever the package does.

By hand, it gives a tracker what it does not have yet of a run that has ended:

    python -P -m distflow_jax.report.trackers.sender runs/first wandb
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import IO, Any, NamedTuple

from distflow_jax.parsing.bounded_child import module_path
from distflow_jax.report.json_lines import append, complete_lines, metrics_row, write_atomic
from distflow_jax.report.trackers.tracker import (
    MOST_RECORDS,
    TrackedRun,
    check_trackers,
    open_tracker,
)

LATE_SECONDS = 60.0  # without a step before a warning
HASTY_SECONDS = 5.0  # that a run waits at most which ends before its end
_ORPHAN_SECONDS = 60.0  # that a process has at least after the run is gone
_POLL_SECONDS = 0.5  # between two looks at metrics.jsonl
_RETRY_SECONDS = 10.0  # before what failed is tried again
_ALIVE_SECONDS = 20.0  # between two signs of life
_TRIES = 3  # of a row, before it may be left out
_MOST_PROBLEMS = 8  # that a run is told of
_TABLES = {"": "samples", "eval-": "eval", "nonfinite-": "nonfinite"}  # files of samples, and kinds

log = logging.getLogger("distflow_jax")


class Trackers:
    """All trackers of a run: `specs` as in observe.trackers; `folder`: of the run.

    `close` waits at most `seconds`, at the end of a run that has made its steps.
    """

    def __init__(self, specs: Sequence[str], folder: pathlib.Path, *, seconds: float = 60.0):
        self._specs, self._folder, self._seconds = specs, folder, seconds
        self._processes: dict[str, subprocess.Popen] = {}  # once the run has written its config
        self._began = 0.0  # when these were started
        self._expected = -1  # the last step of the run
        self._told: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Starts the processes, once: config and plan are written."""
        if self._processes:
            return
        self._began = time.time()
        for spec in self._specs:
            # -P: no module of the working directory stands before the standard library's
            command = [sys.executable, "-P", "-m", f"{__package__}.sender", str(self._folder), spec]
            output = state_path(self._folder, spec).with_suffix(".log")
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.open("a") as file:
                self._processes[spec] = subprocess.Popen(
                    [*command, "--run", str(max(self._seconds, _ORPHAN_SECONDS))],
                    stdin=subprocess.PIPE,  # takes the word of the end
                    stdout=file,
                    stderr=file,
                    # no accelerator if a user's tracker imports JAX
                    env=os.environ | {"PYTHONPATH": module_path(), "JAX_PLATFORMS": "cpu"},
                    # a signal to the run's group reaches none of the processes of a package
                    start_new_session=True,
                )

    def rows(self, step: int) -> None:
        """Says that the metrics of `step` are written; warns of trackers that are late."""
        self.begin()
        for spec in self._specs:
            state = self._look(spec)
            if state["step"] < self._expected and time.time() - state["time"] > LATE_SECONDS:
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
                pipe.write(b"failed" if failed else b"end")
        for spec, process in self._processes.items():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                if not failed:
                    setting = f"observe.tracker_seconds={self._seconds:g}"
                    self._warn(spec, "end", f"it did not end within {setting}")
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if (step := self._look(spec)["step"]) < self._expected:
                has = f"it has {_steps_text(step)} of {self._expected}"
                command = f"python -P -m {__package__}.sender {self._folder} {spec}"
                self._warn(spec, "steps", f"{has}. To give it the rest: {command}")

    def _look(self, spec: str) -> dict[str, Any]:
        """The state of a tracker, see Follower; tells the user its address and problems."""
        process, path = self._processes[spec], state_path(self._folder, spec)
        if code := process.poll():
            log_path = path.with_suffix(".log")
            self._warn(spec, "end", f"its process ended with code {code}; see {log_path}")
        state = {}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.get("process") != process.pid:
            return {"step": -1, "time": self._began}  # an earlier start wrote it
        if (url := state["url"]) and (spec, url) not in self._told:
            self._told.add((spec, url))
            log.info("%s: %s", spec, url)
        for problem in state["problems"]:
            self._warn(spec, problem, f"{problem}; the run goes on")
        return state

    def _warn(self, spec: str, kind: str, text: str) -> None:
        """Warns once of a kind."""
        if (spec, kind) not in self._told:
            self._told.add((spec, kind))
            log.warning("tracker %s: %s", spec, text)


def state_path(folder: pathlib.Path, spec: str) -> pathlib.Path:
    """The state's file of the tracker `spec` in a run's folder."""
    name = re.sub(r"\W+", "_", spec).strip("_")
    return folder / "trackers" / f"{name}.json"


class _MetricsRow(NamedTuple):
    """A row of metrics.jsonl, the hash of its line, and where that ends in the file."""

    step: int
    values: dict[str, int | float]
    digest: str
    end: int


class Follower:
    """Gives the tracker `spec` what it has not had of a run's files. One thread calls it.

    `state` is the content of trackers/NAME.json: the tracker's `run_id` and `url`, the last `step`
    that it has taken, `problems`, each once, and the `time` of the last sign of life.
    trackers/NAME.rows has the hash of each row that it has taken, and the time from which on the
    row is stored for sure, whatever happens to the process.
    """

    def __init__(self, spec: str, folder: pathlib.Path):
        self._spec, self._folder, self._path = spec, folder.resolve(), state_path(folder, spec)
        self._tracker: Any = None
        self._metrics: IO[bytes] | None = None
        self._place, self._tries = 0, 0  # of the first row that was not given
        self.state: dict[str, Any] = {"run_id": None, "step": -1, "url": "", "problems": []}
        self.state |= {"process": os.getpid(), "time": time.time()}
        self._resume()

    def _resume(self) -> None:
        """Finds the first row that the tracker lacks; the run may have dropped rows meanwhile."""
        run_id, stored, path = None, set[str](), self._path.with_suffix(".rows")
        try:
            if self._path.exists():
                state = json.loads(self._path.read_text(encoding="utf-8"))
                times = dict(line.split() for line in complete_lines(path.read_text()))
                stored = {row for row, settled in times.items() if float(settled) <= state["time"]}
                run_id = state["run_id"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            text = f"{self._path} cannot be read ({type(error).__name__})"
            self._problem(f"{text}; a new run of the tracker is begun", error)
        step, kept = -1, []
        for row in self._rows():
            if row.digest not in stored:
                break
            self._place, step = row.end, max(row.step, step)
            kept.append(f"{row.digest} 0\n")
        if step < 1 and len(kept) < len(stored):  # the run has begun anew
            run_id, self._place, step, kept = None, 0, -1, []
        write_atomic(path, "".join(kept))
        self._update(run_id=run_id, step=step)

    def follow(self, failed: Future[bool]) -> None:
        """Gives each row soon after it is written, until it is known whether the run `failed`."""
        pause = 0.0
        while not concurrent.futures.wait([failed], pause).done:
            pause = _POLL_SECONDS if self.catch_up() else _RETRY_SECONDS
            if time.time() - self.state["time"] > _ALIVE_SECONDS:
                self._update(time=time.time())
        self.close(failed.result())

    def catch_up(self) -> bool:
        """Gives the rows that the tracker has not had; returns whether it has all."""
        if self._tracker is None and not self._attempt(self._open):
            return False
        refused: _MetricsRow | None = None
        for row in self._rows():
            if self._give(row, tables=refused is not None or not self._tries):
                if refused:
                    self._problem(f"the row of step {refused.step} was refused and left out")
                    self._note(refused)
                self._note(row)
                refused = None
                continue
            self._tries += 1
            # one row that the tracker refuses, or a tracker that takes none?
            if refused or self._tries < _TRIES:
                return False
            refused = row
        return refused is None

    def close(self, failed: bool) -> None:
        """Gives what is left, with the report, and closes the tracker."""
        for _ in range(_TRIES):
            if self.catch_up():
                break
        if self._tracker is not None:
            self._file("report.html")
            if self._call("close", failed):
                self._update(time=self._settled())

    def _open(self) -> None:
        path = self._folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known = self.state["run_id"]
        run = TrackedRun(self._folder, config, known, self.state["step"])
        self._tracker = open_tracker(self._spec, run)
        run_id, url = (str(getattr(self._tracker, name, "")) for name in ("run_id", "url"))
        if known not in (None, run_id):
            self._problem(f"it has no run {known!r} any more; begun anew as {run_id!r}")
            self._place = 0
            write_atomic(self._path.with_suffix(".rows"), "")
            self._update(step=-1)
        self._update(run_id=run_id, url=url)
        self._file("config.json")
        self._file("plan.svg")

    def _file(self, name: str) -> None:
        if (self._folder / name).exists():
            self._call("file", self._folder / name)

    def _rows(self) -> Iterator[_MetricsRow]:
        """The rows that were not given."""
        path, place = self._folder / "metrics.jsonl", self._place
        if self._metrics is None and path.exists():
            self._metrics = path.open("rb")  # a later start of the run writes another file
        if self._metrics:
            self._metrics.seek(place)
            while (line := self._metrics.readline()).endswith(b"\n"):
                place += len(line)
                values = metrics_row(line.decode("utf-8"))
                digest = hashlib.blake2b(line, digest_size=8).hexdigest()
                yield _MetricsRow(int(values.pop("step")), values, digest, place)

    def _give(self, row: _MetricsRow, tables: bool) -> bool:
        """Gives a row after the tables of its step."""
        for prefix, kind in _TABLES.items() if tables else ():
            path = self._folder / "samples" / f"{prefix}{row.step}.jsonl"
            # an evaluation may have a row of its own
            belongs = any(name.startswith("val-") == (kind == "eval") for name in row.values)
            if belongs and path.exists():
                with path.open(encoding="utf-8") as file:
                    records = [json.loads(line) for line in itertools.islice(file, MOST_RECORDS)]
                self._call("samples", row.step, kind, records)
        return self._call("metrics", row.step, row.values)

    def _note(self, row: _MetricsRow) -> None:
        """Notes that a row needs not be given again, once it is stored."""
        self._place, self._tries = row.end, 0
        with contextlib.suppress(OSError):  # a row that is not named is given again
            append(self._path.with_suffix(".rows"), f"{row.digest} {self._settled()}\n")
        self._update(step=max(row.step, self.state["step"]), time=time.time())

    def _settled(self) -> float:
        """The time at which what was given is stored for sure."""
        return time.time() + getattr(self._tracker, "settle_seconds", 0.0)

    def _call(self, method: str, *arguments: Any) -> bool:
        return self._attempt(lambda: getattr(self._tracker, method)(*arguments))

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except (Exception, SystemExit) as error:  # a package or a user's code may raise anything
            first = (str(error).splitlines() or [""])[0]
            self._problem(f"{type(error).__name__}: {first}", error)
            return False
        return True

    def _problem(self, text: str, error: BaseException | None = None) -> None:
        log.debug("tracker %s: %s", self._spec, text, exc_info=error)
        if text not in self.state["problems"] and len(self.state["problems"]) < _MOST_PROBLEMS:
            self._update(problems=[*self.state["problems"], text])

    def _update(self, **changed: Any) -> None:
        self.state |= changed
        with contextlib.suppress(OSError):  # the run names a disk that fails
            write_atomic(self._path, json.dumps(self.state))


def main(argv: list[str] | None = None) -> int:
    """Runs the process; returns the exit code: 0, or 1 where something could not be given."""
    parser = argparse.ArgumentParser(prog="python -P -m distflow_jax.report.trackers.sender")
    parser.add_argument("folder", type=pathlib.Path, help="the run's folder")
    parser.add_argument("tracker", help="a name as in observe.trackers")
    # of a run: the most seconds after it is gone
    parser.add_argument("--run", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    log.addHandler(logging.StreamHandler())  # tracebacks
    log.setLevel(logging.DEBUG)
    failed: Future[bool] = Future()
    if args.run:
        threading.Thread(target=_await_end, args=(failed, args.run), daemon=True).start()
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
    path = state_path(args.folder, args.tracker).with_suffix(".lock")
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        try:
            # a run waits: the process of a killed one may not have ended yet. Processes that a
            # package forks do not keep the lock
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if args.run else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            feeds = f"{path} is held: a run, or this command, feeds {args.tracker} already"
            print(f"{feeds}; try again when it has ended", file=sys.stderr)
            return 1
        except OSError:
            pass  # a file system without locks, on which only one may feed the tracker
        follower = Follower(args.tracker, args.folder)
        try:
            follower.follow(failed)
        except KeyboardInterrupt:
            return 130
    state = follower.state
    print(f"{args.tracker} {state['url']} has {_steps_text(state['step'])}")
    return int(bool(state["problems"]) and not args.run)


def _await_end(failed: Future[bool], seconds: float) -> None:
    """Takes the word of the run's end, none of a kill, also while a package hangs; ends the process
    after it."""
    # unbuffered: the interpreter could not end while a thread waits in sys.stdin
    failed.set_result(os.read(0, 8) != b"end")
    time.sleep(seconds)
    os._exit(1)


def _steps_text(step: int) -> str:
    return "no step" if step < 0 else f"the steps to {step}"


if __name__ == "__main__":
    sys.exit(main())
