"""The state of a tracker: its own id of a run, and the last rows that it has stored for sure.

It is the file trackers/NAME.json in the run's folder, {"run_id": text or null, "step": step,
"late": step}. The process or thread that feeds the tracker holds the lock trackers/NAME.lock.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from distflow_jax.report.json_lines import write_atomic
from distflow_jax.report.trackers.tracker import file_name

_own: set[int] = set()  # descriptors that no forked process keeps


class Cursor(NamedTuple):
    """The last rows that a tracker has: of a step, and late ones, of an evaluation that ended after
    later steps (RunWriter.late_metrics); -1: none."""

    step: int = -1
    late: int = -1

    def cut(self, last_step: int) -> "Cursor":
        """Without rows of the steps after `last_step`."""
        return Cursor(min(self.step, last_step), min(self.late, last_step))


def state_path(folder: pathlib.Path, spec: str) -> pathlib.Path:
    """The state's file of the tracker `spec` in a run's folder."""
    return folder / "trackers" / f"{file_name(spec)}.json"


def read_state(path: pathlib.Path) -> tuple[str | None, Cursor]:
    """(run_id, cursor) of a tracker; (None, Cursor()) without a file.

    Raises ValueError for a file that is no state.
    """
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        run_id = state["run_id"]
        late = state["late"] if "late" in state else -1  # not in older files
        cursor = Cursor(int(state["step"]), int(late))
        return None if run_id is None else str(run_id), cursor
    except FileNotFoundError:
        return None, Cursor()
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__})") from error


def write_state(path: pathlib.Path, run_id: str | None, cursor: Cursor) -> None:
    """Writes a state; after a power failure it is the old one or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"run_id": run_id, **cursor._asdict()}))


def cut_state(path: pathlib.Path, last_step: int) -> None:
    """Forgets the steps after `last_step`; -1: the state. Raises ValueError for a file that is no
    state."""
    if last_step == -1:
        path.unlink(missing_ok=True)
        return
    run_id, cursor = read_state(path)
    if max(cursor) > last_step:
        write_state(path, run_id, cursor.cut(last_step))


def cut_states(folder: pathlib.Path, last_step: int, fed: Iterable[str] = ()) -> None:
    """Forgets, in the states of all trackers of a run, the steps after `last_step`; -1: all.

    The run drops these steps, also for a tracker that it does not feed this time. A state that the
    process of a killed run still holds is cut when that process has ended. `fed` are the trackers
    that the run feeds: their followers cut a state that is held.
    """
    own = {file_name(spec) for spec in fed}
    for path in sorted((folder / "trackers").glob("*.json")):
        if not _cut_held(path, last_step, wait=False) and path.stem not in own:
            threading.Thread(
                target=_cut_held, args=(path, last_step), kwargs={"wait": True}, daemon=True
            ).start()


def _cut_held(path: pathlib.Path, last_step: int, *, wait: bool) -> bool:
    """Cuts a state unless another holds it; returns whether it was free."""
    with held(path, wait=wait) as free, contextlib.suppress(ValueError):
        if free:
            cut_state(path, last_step)
    return free


@contextlib.contextmanager
def held(path: pathlib.Path, *, wait: bool) -> Iterator[bool]:
    """Holds the lock of a state; gives False at once where another has it and `wait` is off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with own_descriptor(os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)) as lock:
        free = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            free = False
        except OSError:
            pass  # a file system without locks, on which only one may feed the tracker
        yield free


@contextlib.contextmanager
def own_descriptor(descriptor: int) -> Iterator[int]:
    """Closes a descriptor at the end of the block, and at once in each process that is forked.

    A package may fork processes that live on, and what they keep open, such as a lock, would too.
    """
    _own.add(descriptor)
    try:
        yield descriptor
    finally:
        if descriptor in _own:
            _own.remove(descriptor)
            os.close(descriptor)


def _close_own() -> None:
    while _own:
        os.close(_own.pop())


os.register_at_fork(after_in_child=_close_own)
