"""The way from a run's folder to one tracker: every step once, also after a kill.

metrics.jsonl is the truth: a follower gives the rows after its cursor, the last ones that the
tracker has stored. Nothing waits for it, and nothing is queued: what a slow tracker has not taken
yet lies in the files. Its state is trackers/NAME.json, {"run_id": text or null, "step": step,
"late": step}; the process that feeds the tracker holds the lock trackers/NAME.lock.
"""

import contextlib
import fcntl
import itertools
import json
import logging
import pathlib
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import IO, Any, NamedTuple

from distflow_jax.report.json_lines import metrics_row, write_atomic
from distflow_jax.report.trackers.tracker import MOST_RECORDS, TrackedRun, Tracker, open_tracker

_POLL_SECONDS = 0.5  # between two looks at metrics.jsonl
_TRIES = 3  # of a row, before it may be left out, and of a file
_KINDS = {"": "samples", "eval-": "eval", "nonfinite-": "nonfinite"}

log = logging.getLogger("distflow_jax")


class Cursor(NamedTuple):
    """The last rows that a tracker has: of a step, and late ones, of an evaluation that ended after
    later steps (RunWriter.late_metrics); -1: none."""

    step: int = -1
    late: int = -1


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
      last_step: step that the run goes on from; -1: nothing is kept of an earlier start. None: all
        rows of the folder are final.
      tell: takes {"step": last step given}, {"problem": text} or {"url": text}, as they come.
    """

    def __init__(
        self,
        spec: str,
        folder: pathlib.Path,
        last_step: int | None,
        tell: Callable[[Mapping[str, Any]], None],
    ):
        self._spec, self._folder, self._tell = spec, folder.resolve(), tell
        self._metrics, self._state = self._folder / "metrics.jsonl", state_path(self._folder, spec)
        self._run_id, self._cursor = None, Cursor()
        try:
            self._run_id, self._cursor = read_state(self._state, last_step)
        except (OSError, ValueError) as error:
            self._problem(f"{error}; a new run of the tracker is begun", error)
        tell({"step": self._cursor.step})
        self._tracker: Tracker | None = None
        self._given: deque[tuple[float, Cursor]] = deque()  # with times; not stored for sure yet
        self._place, self._tries = _Place(), 0  # of the first row that was not given
        self._files = {"config.json": 0, "plan.svg": 0}  # still to give, how often that was tried

    def follow(self, ends: "queue.SimpleQueue[str]") -> None:
        """Gives each row soon after it is written, until `ends` has a word: "end", or another one
        for a run that ended before its end."""
        end, seen = "", None
        while not end:
            size = self._metrics.stat().st_size if self._metrics.exists() else 0
            if size != seen:
                self.catch_up()
            seen = size
            with contextlib.suppress(queue.Empty):
                end = ends.get(timeout=_POLL_SECONDS)
        self.close(failed=end != "end")

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
            self._tell({"step": self._cursor.step})
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
        run = TrackedRun(self._folder, config, self._run_id, self._cursor.step)
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
        settled = time.monotonic() - getattr(self._tracker, "settle_seconds", 0.0)
        while self._given and self._given[0][0] <= settled:
            self._keep(self._given.popleft()[1])
        return True

    def _keep(self, cursor: Cursor) -> None:
        self._attempt(lambda: write_state(self._state, self._run_id, cursor))

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
        self._tell({"problem": text})


def state_path(folder: pathlib.Path, spec: str) -> pathlib.Path:
    """The state's file of the tracker `spec` in a run's folder."""
    name = re.sub(r"\W+", "_", spec).strip("_")
    return folder / "trackers" / f"{name}.json"


def read_state(path: pathlib.Path, last_step: int | None = None) -> tuple[str | None, Cursor]:
    """(run_id, cursor) of a tracker, (None, Cursor()) without a file; ValueError for no state.

    Steps after `last_step` are forgotten, also in the file; -1: all, None: none.
    """
    if last_step == -1:
        path.unlink(missing_ok=True)
    if not path.exists():
        return None, Cursor()
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        run_id, late = state["run_id"], state.get("late", -1)  # not in older files
        run_id, cursor = run_id and str(run_id), Cursor(int(state["step"]), int(late))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__})") from error
    if last_step is not None and max(cursor) > last_step:
        cursor = Cursor(min(cursor.step, last_step), min(cursor.late, last_step))
        write_state(path, run_id, cursor)
    return run_id, cursor


def write_state(path: pathlib.Path, run_id: str | None, cursor: Cursor) -> None:
    """Writes a state; after a power failure it is the old one or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"run_id": run_id, **cursor._asdict()}))


def cut_states(folder: pathlib.Path, last_step: int, fed: Iterable[str] = ()) -> None:
    """Forgets, in the states of all trackers of a run, the steps after `last_step`; -1: all.

    The run drops these steps, also for a tracker that it does not feed this time. A state that the
    process of a killed run still holds is cut when that has ended: by the follower of a tracker
    that is `fed`, by a thread for others.
    """

    def cut(path: pathlib.Path, wait: bool) -> bool:
        if not (held := lock(path, wait=wait)):
            return False
        with held, contextlib.suppress(ValueError):
            read_state(path, last_step)
        return True

    own = {state_path(folder, spec) for spec in fed}
    for path in (folder / "trackers").glob("*.json"):
        if not cut(path, False) and path not in own:
            threading.Thread(target=cut, args=(path, True), daemon=True).start()


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
