"""The way from a run's folder to one tracker: every step once, also after a kill.

metrics.jsonl is the truth: a follower gives the rows after its cursor, the last ones that the
tracker has stored. Nothing waits for it, and nothing is queued: what a slow tracker has not taken
yet lies in the files. Its state is trackers/NAME.json; the process that feeds the tracker holds the
lock trackers/NAME.lock. Each start of a run appends the step that it goes on from to
trackers/starts.txt: a state that does not know of a start forgets the later steps.
"""

import concurrent.futures
import contextlib
import fcntl
import itertools
import json
import logging
import pathlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import IO, Any, NamedTuple

from distflow_jax.report.json_lines import append, complete_lines, metrics_row, write_atomic
from distflow_jax.report.trackers.tracker import MOST_RECORDS, TrackedRun, Tracker, open_tracker

_POLL_SECONDS = 0.5  # between two looks at metrics.jsonl
_TRIES = 3  # of a row, before it may be left out, and of a file
_MOST_PROBLEMS = 8  # that a run is told of
_KINDS = {"": "samples", "eval-": "eval", "nonfinite-": "nonfinite"}

log = logging.getLogger("distflow_jax")


class Cursor(NamedTuple):
    """The last rows that a tracker has: of a step, and late ones, of an evaluation that ended after
    later steps (RunWriter.late_metrics); -1: none."""

    step: int = -1
    late: int = -1


class State(NamedTuple):
    """Content of trackers/NAME.json."""

    run_id: str | None = None  # the tracker's own
    cursor: Cursor = Cursor()  # stored for sure
    given: int = -1  # the last step that the tracker has taken
    url: str = ""
    problems: tuple[str, ...] = ()  # each once
    reader: str = ""  # the start of the run that this is written for; "": by hand


class _Place(NamedTuple):
    """The end of a row in metrics.jsonl."""

    offset: int = 0
    step: int = -1  # the last one up to here
    late: bool = False


class Follower:
    """Gives a tracker what it has not had of a run's files. One thread calls it.

    Args:
      spec: the tracker's name in observe.trackers.
      folder: the run's folder.
      reader: as in `State`.

    Attributes:
      state: as it was written last.
    """

    def __init__(self, spec: str, folder: pathlib.Path, reader: str = ""):
        self._spec, self._folder = spec, folder.resolve()
        self._metrics, self._path = self._folder / "metrics.jsonl", state_path(self._folder, spec)
        self._starts, self.state = len(_starts(self._path)), State()
        try:
            self.state = read_state(self._path)
        except ValueError as error:
            self._problem(f"{error}; a new run of the tracker is begun", error)
        self._cursor = self.state.cursor  # given
        self._keep(self._cursor, reader=reader)
        self._tracker: Tracker | None = None
        self._given: deque[tuple[float, Cursor]] = deque()  # with times; not stored for sure yet
        self._place, self._tries = _Place(), 0  # of the first row that was not given
        self._files = {"config.json": 0, "plan.svg": 0}  # still to give, how often that was tried

    def follow(self, failed: Future[bool]) -> None:
        """Gives each row soon after it is written, until it is known whether the run `failed`."""
        seen, has_ended = None, False
        while not has_ended:
            size = self._metrics.stat().st_size if self._metrics.exists() else 0
            if size != seen:
                self.catch_up()
            seen = size
            has_ended = bool(concurrent.futures.wait([failed], _POLL_SECONDS).done)
        self.close(failed.result())

    def catch_up(self) -> bool:
        """Gives the files and rows that the tracker has not had; returns whether it has all."""
        if self._tracker is None and not self._attempt(self._open):
            return False
        for name, tries in list(self._files.items()):
            self._files[name], path = tries + 1, self._folder / name
            given = not path.exists() or self._attempt(partial(self._tracker.file, path))
            if given or tries + 1 == _TRIES:
                del self._files[name]
        rows = self._rows()
        for row, end in rows:
            if not self._give(row, end, tables=not self._tries):
                self._tries += 1
                # one row that the tracker refuses, or a tracker that takes none?
                after = next(rows, None) if self._tries >= _TRIES else None
                if after is None or not self._give(*after):
                    return False
                self._problem(f"the row of step {row['step']} was refused and left out")
                end = after[1]
            self._tries, self._place = 0, end
        return True

    def close(self, failed: bool) -> None:
        """Gives what is left, with the report, and closes the tracker."""
        self._files["report.html"] = 0
        for _ in range(_TRIES):
            if self.catch_up():
                break
        if self._tracker and self._attempt(lambda: self._tracker.close(failed)):
            self._keep(self._cursor)

    def _open(self) -> None:
        path = self._folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known = self.state.run_id
        run = TrackedRun(self._folder, config, known, self._cursor.step)
        tracker = open_tracker(self._spec, run)
        opened = str(getattr(tracker, "run_id", ""))
        if known not in (None, opened):
            self._problem(f"it has no run {known!r} any more; begun anew as {opened!r}")
            self._cursor = Cursor()
        self._tracker = tracker
        self._keep(self._cursor, run_id=opened, url=str(getattr(tracker, "url", "")))

    def _rows(self) -> Iterator[tuple[dict[str, Any], _Place]]:
        """The rows after the cursor, each with the place in the file where it ends."""
        if not self._metrics.exists():
            return
        place = self._place
        with self._metrics.open("rb") as file:
            file.seek(place.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                row = metrics_row(line.decode("utf-8"))
                late = row["step"] <= place.step
                place = _Place(place.offset + len(line), max(place.step, row["step"]), late)
                if row["step"] > (self._cursor.late if late else self._cursor.step):
                    yield row, place

    def _give(self, row: Mapping[str, Any], end: _Place, tables: bool = True) -> bool:
        """Gives a row, which ends at `end`, after the tables of its step."""
        step = int(row["step"])
        values = {name: value for name, value in row.items() if name != "step"}
        evaluated = any(name.startswith("val-") for name in values)
        for prefix, kind in _KINDS.items() if tables else ():
            path = self._folder / "samples" / f"{prefix}{step}.jsonl"
            if (evaluated if kind == "eval" else not end.late) and path.exists():
                with path.open(encoding="utf-8") as file:
                    records = [json.loads(line) for line in itertools.islice(file, MOST_RECORDS)]
                self._attempt(partial(self._tracker.samples, step, kind, records))
        if not self._attempt(lambda: self._tracker.metrics(step, values)):
            return False
        self._cursor = self._cursor._replace(**{"late" if end.late else "step": step})
        self._given.append((time.monotonic(), self._cursor))
        stored, settled = self.state.cursor, getattr(self._tracker, "settle_seconds", 0.0)
        while self._given and self._given[0][0] <= time.monotonic() - settled:
            stored = self._given.popleft()[1]
        self._keep(stored)
        return True

    def _keep(self, stored: Cursor, **changed: Any) -> None:
        """Writes the state."""
        state = self.state._replace(cursor=stored, given=self._cursor.step, **changed)
        self.state = state
        self._attempt(lambda: write_state(self._path, state, self._starts))

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
        if text not in self.state.problems and len(self.state.problems) < _MOST_PROBLEMS:
            self.state = self.state._replace(problems=(*self.state.problems, text))
            with contextlib.suppress(OSError):
                write_state(self._path, self.state, self._starts)


def state_path(folder: pathlib.Path, spec: str) -> pathlib.Path:
    """The state's file of the tracker `spec` in a run's folder."""
    name = re.sub(r"\W+", "_", spec).strip("_")
    return folder / "trackers" / f"{name}.json"


def note_start(folder: pathlib.Path, last_step: int) -> None:
    """Notes that a run drops the steps after `last_step`, which the trackers that it has had may
    have; -1: all."""
    if (folder / "trackers").is_dir():
        append(folder / "trackers" / "starts.txt", f"{last_step}\n")


def _starts(path: pathlib.Path) -> list[int]:
    """The steps that the starts of a run have gone on from; `path`: of a state."""
    noted = path.with_name("starts.txt")
    return [int(line) for line in complete_lines(noted.read_text())] if noted.exists() else []


def read_state(path: pathlib.Path) -> State:
    """A tracker's id and cursor, without steps that the run has dropped meanwhile.

    Raises ValueError for a file that is no state.
    """
    if not path.exists():
        return State()
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        run_id, late = tree["run_id"], tree.get("late", -1)  # not in older files
        run_id, cursor = run_id and str(run_id), Cursor(int(tree["step"]), int(late))
        dropped = _starts(path)[int(tree.get("starts", 0)) :]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__})") from error
    last = min(dropped, default=max(cursor))
    if dropped and last == -1:
        return State()
    cursor = Cursor(min(cursor.step, last), min(cursor.late, last))
    return State(run_id, cursor, cursor.step)


def write_state(path: pathlib.Path, state: State, starts: int) -> None:
    """Writes a state that knows of so many starts; after a power failure it is the old one or the
    new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = state._asdict() | state.cursor._asdict() | {"starts": starts}
    del tree["cursor"]
    write_atomic(path, json.dumps(tree))


def lock(path: pathlib.Path, *, wait: bool) -> IO[str] | None:
    """Locks a state until the file that is returned is closed, or this process ends.

    None: another process has the lock, and `wait` is off. Processes that a package forks do not
    keep it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_suffix(".lock").open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        return None
    except OSError:
        pass  # a file system without locks, on which only one may feed the tracker
    return file
