"""Records of a run's steps in partial batches, from which its training is repeated without a
sampler.

    WORKDIR/recorded/STEP/PROCESS.npz   arrays and facts of one process in one step

Each process writes its own, in the background; a file has its name once it is whole. A step that a
restart trained again has the record of the last time.
"""

import contextlib
import json
import pathlib
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.layout import Layout
from distflow_jax.parallel import processes
from distflow_jax.stream.batches.step_record import StepRecord, from_arrays, to_arrays

FOLDER = "recorded"
MOST_UNWRITTEN = 2  # steps whose records wait for the disk: the training waits for more of them
_FACTS = "facts.json"  # name of the array that holds the facts as text
_DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile)


def drop_later(folder: pathlib.Path, step: int) -> None:
    """Drops records of steps after this one, by an earlier start of the run. Collective."""
    if not processes.process_index():
        for found, place in _steps(folder).items():
            if found > step:
                shutil.rmtree(place)
    processes.all_gather_ints(np.int64(step))  # nobody writes before


class RecordWriter:
    """Writes this process's records in the background.

    Call `wait` before a checkpoint: a run that goes on from it must have the records before it.
    """

    def __init__(self, folder: pathlib.Path, start: Mapping[str, Any]):
        """`folder`: of the run; `start`: JSON values that a replay must have alike."""
        count = processes.process_count()
        self._folder, self._start = folder / FOLDER, {"processes": count, **start}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._writing: list[Future[None]] = []

    def add(self, record: StepRecord) -> None:
        """Begins to write a record. Raises the error of one before, OSError if it is a disk's."""
        while self._writing and (self._writing[0].done() or len(self._writing) >= MOST_UNWRITTEN):
            self._writing.pop(0).result()
        self._writing.append(self._thread.submit(self._write, record))

    def wait(self) -> None:
        """Waits until all records are written; raises the error of one that could not be."""
        while self._writing:
            self._writing.pop(0).result()

    def close(self) -> None:
        """Ends the thread when all is written."""
        self._thread.shutdown()
        self.wait()

    def _write(self, record: StepRecord) -> None:
        arrays, facts = to_arrays(record)
        text = json.dumps(facts | {"start": self._start}).encode()
        path = self._folder / str(record.step) / f"{processes.process_index()}.npz"
        part = path.with_suffix(".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                np.savez(file, **arrays, **{_FACTS: np.frombuffer(text, np.uint8)})
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            error.filename = error.filename or str(path)  # writes to an open file have none
            raise


class Recording:
    """The records of a run, read by one process of as many.

    Attributes:
      folder: the run's.
      last: the last step that all processes have recorded.
      starts: (step, JSON values that the RecordWriter of its start was given), of the first step
        and of each whose values are others than those of the step before.
    """

    def __init__(self, folder: pathlib.Path, done: int, process: int, count: int):
        """Opens the records of the steps after `done`.

        Raises ValueError if there are none, one is missing or cannot be read, or they are those of
        another number of processes than `count`.
        """
        self.folder, self._process = folder, process
        self.starts: list[tuple[int, dict[str, Any]]] = []
        steps = _steps(folder)
        if not steps:
            raise ValueError(
                f"--replay={str(folder)!r} has no records of partial batches, "
                f"{FOLDER}/STEP/PROCESS.npz: give the folder of a run with stream.record=True"
            )
        whole = [step for step in steps if self._known(step) >= {*range(count)}]
        # records beyond the last whole one are of a run that was killed while it wrote them
        self.last = max([step for step in whole if step > done], default=max(steps))
        for step in range(done + 1, self.last + 1):
            known = self._known(step)
            if known:
                self._open(step, process if process in known else min(known), count)
            if lacking := sorted({*range(count)} - known):
                raise ValueError(
                    f"--replay={str(folder)!r} lacks {self._path(step, lacking[0])}: it has "
                    f"records of steps {min(steps)} to {max(steps)}, and the replay needs all from "
                    f"step {done + 1} on"
                )

    def read(
        self,
        step: int,
        writers: Mapping[str | None, Layout],
        prompt: Callable[[int], Prompt],
    ) -> StepRecord:
        """This process's record of a step, see from_arrays. ValueError if it cannot be read."""
        with self._opened(self._path(step, self._process)) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        return from_arrays(found, json.loads(found[_FACTS].tobytes()), writers, prompt)

    def _open(self, step: int, process: int, count: int) -> None:
        """Reads what the record of a step says of its start."""
        with self._opened(self._path(step, process)) as arrays:
            start = json.loads(arrays[_FACTS].tobytes())["start"]
        if start["processes"] != count:
            raise ValueError(
                f"--replay={str(self.folder)!r}: step {step} was recorded by {start['processes']} "
                f"processes, and this job has {count}: start it with as many"
            )
        if not self.starts or self.starts[-1][1] != start:
            self.starts.append((step, start))

    @contextlib.contextmanager
    def _opened(self, path: pathlib.Path) -> Iterator[Any]:
        """A block with the arrays of a file by name."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                yield arrays
        except _DAMAGE as error:
            raise ValueError(
                f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged; copy it "
                "again, or record the run again"
            ) from error

    def _known(self, step: int) -> set[int]:
        """The processes that have a record of a step."""
        found = (self.folder / FOLDER / str(step)).glob("*.npz")
        return {int(path.stem) for path in found if path.stem.isdigit()}

    def _path(self, step: int, process: int) -> pathlib.Path:
        return self.folder / FOLDER / str(step) / f"{process}.npz"


def _steps(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The folders of steps that have records, by step."""
    found = (folder / FOLDER).glob("*")
    return {int(path.name): path for path in found if path.name.isdigit() and path.is_dir()}
