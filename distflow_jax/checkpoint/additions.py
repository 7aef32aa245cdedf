"""Additions to a checkpoint: what each process writes when it has it, after the arrays.

    FOLDER/STEP/additions.json      {"processes": N}: so many additions make the checkpoint complete
    FOLDER/STEP/additions/I.npz     arrays and facts of process I
    FOLDER/STEP/additions/I.json    {file: [bytes, CRC-32s]}, written last

No message is needed: whoever sees N of the last kind sees a complete checkpoint.
"""

import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from etils import epath

from distflow_jax.checkpoint import checksums
from distflow_jax.cluster import processes

FOLDER, FILE = "additions", "additions.json"
POLL_SECONDS = 0.05  # between two looks for the checkpoint's name
_FACTS = "facts.json"  # name of the array that holds the facts as text
_RENAMED = {"max_lag": "max_staleness", "ledger": "account"}  # facts of earlier releases


def announce(checkpoint: epath.Path, number: int) -> None:
    """Writes that `number` processes will add to a checkpoint, before it has its name."""
    (checkpoint / FOLDER).mkdir(parents=True, exist_ok=True)
    (checkpoint / FILE).write_text(json.dumps({"processes": number}))


def count(checkpoint: epath.Path) -> int:
    """How many processes add to a checkpoint; ValueError if additions.json cannot be read."""
    path = checkpoint / FILE
    if not path.exists():
        return 0
    try:
        found = json.loads(path.read_text())["processes"]
    except (ValueError, KeyError, TypeError, RecursionError, IsADirectoryError) as error:
        raise ValueError(f"{FILE}: {type(error).__name__}") from error
    if type(found) is not int or not 0 < found < 1 << 20:
        raise ValueError(f"{FILE}: {found!r} is no number of processes")
    return found


def miscounted(checkpoint: epath.Path, number: int) -> str:
    """A difference in words between additions.json and the `number` of its record; "" if none."""
    try:
        found = count(checkpoint)
    except ValueError as error:
        return str(error)
    return "" if found == number else f"{FILE} names {found} processes, and the record {number}"


def lacking(checkpoint: epath.Path) -> str:
    """The additions that a checkpoint lacks in words; "" if it is complete."""
    try:
        missing = [i for i in range(count(checkpoint)) if not _table(checkpoint, i).exists()]
    except ValueError as error:
        return str(error)
    if not missing:
        return ""
    return f"it lacks what process {', '.join(map(str, missing))} had to add: {FOLDER}/"


def checksum_table(checkpoint: epath.Path) -> tuple[dict[str, checksums.Checksum], str]:
    """({file: its checksum} of all additions, "") of a complete checkpoint, or ({}, the damage)."""
    table: dict[str, checksums.Checksum] = {}
    for index in range(count(checkpoint)):
        found, failure = checksums.read_table(_table(checkpoint, index))
        if failure:
            return {}, failure
        table |= found
    return table, ""


class Addition:
    """Arrays and JSON values that one process added to a checkpoint; arrays are read when needed.

    ValueError or OSError if it cannot be read.
    """

    def __init__(self, checkpoint: epath.Path, index: int):
        self._path = _arrays(checkpoint, index)
        facts = json.loads(self.read(_FACTS)[_FACTS].tobytes())
        self.facts: dict[str, Any] = {_RENAMED.get(key, key): facts[key] for key in facts}

    def read(self, *names: str) -> dict[str, np.ndarray]:
        """Arrays by name."""
        with self._path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            return {name: found[name] for name in names}


def additions(checkpoint: epath.Path) -> list[Addition]:
    """The additions of all processes to a complete checkpoint, in their order."""
    return [Addition(checkpoint, index) for index in range(count(checkpoint))]


class AdditionWriter:
    """Writes this process's additions in the background, each after its checkpoint has its name."""

    def __init__(self, folder: epath.Path):
        """`folder`: of all checkpoints."""
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="additions")
        self._writing: list[Future[None]] = []
        self._closing = threading.Event()

    def add(self, step: int, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Begins to write what this process adds to the checkpoint of a step: arrays of any shape,
        and facts, JSON values."""
        text = np.frombuffer(json.dumps(facts, allow_nan=False).encode(), np.uint8)
        self._writing.append(self._thread.submit(self._write, step, {**arrays, _FACTS: text}))

    def check(self) -> None:
        """Raises the error of one that could not be written, such as OSError of a full disk."""
        while self._writing and self._writing[0].done():
            self._writing.pop(0).result()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until all are written, or so long; raises the error of what could not be."""
        wait(self._writing, seconds)
        self.check()

    def close(self) -> None:
        """Ends the thread when it has written what belongs to checkpoints that have their names."""
        self._closing.set()
        self._thread.shutdown()
        self.check()

    def _write(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        checkpoint, index = self._folder / str(step), processes.process_index()
        while not checkpoint.exists():
            if self._closing.wait(POLL_SECONDS) and not checkpoint.exists():
                return  # it could not be written
        path, table = _arrays(checkpoint, index), _table(checkpoint, index)
        with (part := path.with_suffix(".part")).open("wb") as file:
            np.savez(file, **arrays)
        found = checksums.of_files({path.relative_to(checkpoint).as_posix(): part})
        part.rename(path)
        (part := table.with_suffix(".tmp")).write_text(json.dumps(found))
        part.rename(table)


def _arrays(checkpoint: epath.Path, index: int) -> epath.Path:
    return checkpoint / FOLDER / f"{index}.npz"


def _table(checkpoint: epath.Path, index: int) -> epath.Path:
    return checkpoint / FOLDER / f"{index}.json"
