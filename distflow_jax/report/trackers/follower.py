"""The way from a run's folder to one tracker: every step once, also after a kill.

metrics.jsonl is the truth. A follower gives the rows after its cursor, the last ones that the
tracker has stored, and keeps the cursor and the tracker's own id in trackers/NAME.json. Nothing
waits for it, and nothing is queued: what a slow tracker has not taken yet lies in the files.
"""

import dataclasses
import itertools
import json
import pathlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distflow_jax.report.json_lines import metrics_row
from distflow_jax.report.trackers.tracker import (
    MOST_RECORDS,
    TrackedRun,
    Tracker,
    open_tracker,
)
from distflow_jax.report.trackers.tracker_state import (
    Cursor,
    cut_state,
    read_state,
    state_path,
    write_state,
)

_TRIES = 3  # of a row, before it may be left out
_ROWS = 64  # read at once
_KINDS = {"": "samples", "eval-": "eval", "nonfinite-": "nonfinite"}
_EVALUATED = "val-"  # how the names of an evaluation's metrics begin
LAST_WORDS = ("end", "failed", "lost")

Tell = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class _Place:
    """The end of a row in metrics.jsonl."""

    offset: int = 0
    step: int = -1  # the last one up to here
    late: bool = False  # whether the row is of an evaluation that ended after later steps


class Words:
    """The words that a follower has still to obey, each once: what it obeys covers all before it.

    Iteration waits for words, and ends after one of LAST_WORDS.
    """

    def __init__(self):
        self._waiting: list[str] = []
        self._changed = threading.Condition()

    def put(self, word: str) -> None:
        """Adds a word, unless it waits already or nothing can follow."""
        with self._changed:
            if word not in self._waiting and not set(LAST_WORDS).intersection(self._waiting):
                self._waiting.append(word)
                self._changed.notify()

    def __iter__(self) -> Iterator[str]:
        word = ""
        while word not in LAST_WORDS:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                word = self._waiting.pop(0)
            yield word


class Follower:
    """Feeds one tracker from the files of a run. One thread calls it, which holds its state.

    Args:
      spec: the tracker's name in observe.trackers.
      folder: the run's folder.
      project: observe.tracker_project.
      last_step: step that the run goes on from; -1: nothing is kept of an earlier start. None: all
        rows of the folder are final.
      tell: takes {"step": last step given}, {"problem": text, "trace": text} or {"url": text}, as
        they come.
    """

    def __init__(
        self, spec: str, folder: pathlib.Path, project: str, last_step: int | None, tell: Tell
    ):
        self._spec, self._folder, self._project, self._tell = spec, folder.resolve(), project, tell
        self._state_path = state_path(self._folder, spec)
        self._run_id, self._cursor = self._earlier(last_step)
        self._tell({"step": self._cursor.step})
        self._tracker: Tracker | None = None
        self._given: deque[tuple[float, Cursor]] = deque()  # with times; not stored for sure yet
        self._place = _Place()  # of the first row that was not given
        self._tries = 0
        self._tables_of: _Place | None = None  # the row whose samples were given last
        self._files: dict[str, int] = {}  # still to give, and how often that was tried
        self._begun = False

    def _earlier(self, last_step: int | None) -> tuple[str | None, Cursor]:
        """The run's id in the tracker, and the last rows that it has and the run keeps."""
        try:
            if last_step is not None:
                cut_state(self._state_path, last_step)
            return read_state(self._state_path)
        except (OSError, ValueError) as error:
            self._problem(f"{error}; a new run of the tracker is begun", error)
            return None, Cursor()

    def command(self, word: str) -> None:
        """Obeys a word: "begin", "rows", or a last one, "end", "failed" or "lost" (killed)."""
        if word == "begin":
            self.begin()
        elif word == "rows":
            self.catch_up()
        else:
            self.close(failed=word != "end")

    def begin(self) -> None:
        """Opens the tracker with config.json, which is the run's by now, and gives the plan."""
        self._files |= {name: 0 for name in ("config.json", "plan.svg") if self._has(name)}
        self.catch_up()

    def catch_up(self) -> None:
        """Gives the files and rows that the tracker has not had."""
        self._begun = True
        if not self._open():
            return
        self._give_files()
        rows = deque(self._rows())
        while rows:
            row, end = rows.popleft()
            if not self._give(row, end):
                self._tries += 1
                # one row that the tracker refuses, or a tracker that takes none?
                if self._tries < _TRIES or not rows or not self._give(*rows[0]):
                    return
                self._problem(f"the row of step {row['step']} was refused and left out")
                _, end = rows.popleft()
            self._tries, self._place = 0, end
            self._tell({"step": self._cursor.step})
            rows = rows or deque(self._rows())

    def close(self, failed: bool) -> None:
        """Gives what is left, with the report, and closes the tracker."""
        if not self._begun:
            return
        self._files |= {"report.html": 0} if self._has("report.html") else {}
        for _ in range(_TRIES):
            self.catch_up()
            if self._tracker is None or next(self._rows(), None) is None:
                break
        if self._tracker is None:
            return
        if self._attempt(lambda: self._tracker.close(failed)):
            self._given.clear()
            self._keep(self._cursor)

    def _open(self) -> bool:
        return self._tracker is not None or self._attempt(self._make)

    def _make(self) -> None:
        config = {}
        if self._has("config.json"):
            config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        run = TrackedRun(self._folder, config, self._project, self._run_id, self._cursor.step)
        tracker = open_tracker(self._spec, run)
        opened = str(getattr(tracker, "run_id", ""))
        if self._run_id not in (None, opened):
            self._problem(f"it has no run {self._run_id!r} any more; begun anew as {opened!r}")
            self._cursor = Cursor()
            self._tell({"step": -1})
        self._tracker, self._run_id = tracker, opened
        self._keep(self._cursor)
        if url := getattr(tracker, "url", ""):
            self._tell({"url": url})

    def _give_files(self) -> None:
        for name, tries in list(self._files.items()):
            path = self._folder / name
            self._files[name] = tries + 1
            if self._attempt(lambda path=path: self._tracker.file(path)) or tries + 1 == _TRIES:
                del self._files[name]

    def _rows(self) -> Iterator[tuple[dict[str, Any], _Place]]:
        """The next rows after the cursor, each with the place in the file where it ends."""
        path = self._folder / "metrics.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._place.offset)
            place, found = self._place, 0
            for line in file:
                if not line.endswith(b"\n") or found == _ROWS:
                    return
                row = metrics_row(line.decode("utf-8"))
                late = row["step"] <= place.step
                place = _Place(place.offset + len(line), max(place.step, row["step"]), late)
                if row["step"] > (self._cursor.late if late else self._cursor.step):
                    found += 1
                    yield row, place

    def _give(self, row: Mapping[str, Any], end: _Place) -> bool:
        """Gives a row, which ends at `end`."""
        step = int(row["step"])
        values = {name: value for name, value in row.items() if name != "step"}
        evaluated = any(name.startswith(_EVALUATED) for name in values)
        for prefix, kind in _KINDS.items() if end != self._tables_of else ():
            own = evaluated if kind == "eval" else not end.late
            if records := self._records(f"{prefix}{step}") if own else []:
                self._attempt(lambda kind=kind, got=records: self._tracker.samples(step, kind, got))
        self._tables_of = end
        if not self._attempt(lambda: self._tracker.metrics(step, values)):
            return False
        self._cursor = self._cursor._replace(**{"late" if end.late else "step": step})
        self._given.append((time.monotonic(), self._cursor))
        settled = time.monotonic() - getattr(self._tracker, "settle_seconds", 0.0)
        while self._given and self._given[0][0] <= settled:
            self._keep(self._given.popleft()[1])
        return True

    def _records(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / "samples" / f"{name}.jsonl"
        if not path.exists():
            return []
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in itertools.islice(file, MOST_RECORDS)]

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except (Exception, SystemExit) as error:  # a package or a user's code may raise anything
            first = (str(error).splitlines() or [""])[0]
            self._problem(f"{type(error).__name__}: {first}", error)
            return False
        return True

    def _problem(self, text: str, error: BaseException | None = None) -> None:
        trace = "" if error is None else "".join(traceback.format_exception(error))
        self._tell({"problem": text, "trace": trace})

    def _keep(self, cursor: Cursor) -> None:
        """Writes the tracker's id and the last rows that it has stored for sure."""
        try:
            write_state(self._state_path, self._run_id, cursor)
        except OSError as error:
            self._problem(f"{self._state_path} cannot be written: {error}", error)

    def _has(self, name: str) -> bool:
        return (self._folder / name).exists()
