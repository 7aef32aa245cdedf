"""Recordings of runs in partial batches, from which training is repeated without a sampler.

    WORKDIR/partial_batches.jsonl       a line per partial batch
    WORKDIR/recorded/STEP/PROCESS.npz   with stream.record: the groups of one process in one step

A line has "step", "partial_batch" within it, "mini_batch", "counters" of its groups, "tokens" and
"sequences", "rows" that they take of the "room" over all data ranks, "versions" [lowest, highest]
of their tokens, "last" of the step, and "waited", the seconds that process 0 waited for it. Each
process writes its own groups in the background; a file gets its name when it is complete. If a
restart trained a step again, the record is that of the last time.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import zipfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.cluster import processes
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import DATA_ENDED, Ended
from distflow_jax.layout import Layout, Metrics
from distflow_jax.report.json_lines import append
from distflow_jax.report.run_writer import truncate_metrics
from distflow_jax.stream.batches.group_facts import GroupFacts
from distflow_jax.stream.batches.partial_batches import PartialBatch
from distflow_jax.stream.frames.node_frames import packed_column, unpacked_column
from distflow_jax.stream.host_nodes import Group
from distflow_jax.stream.schedule import Cut
from distflow_jax.stream.step_groups import StepGroups

FILE, FOLDER = "partial_batches.jsonl", "recorded"
MOST_UNWRITTEN = 2  # steps whose records wait for the disk: the training waits for more of them
_FACTS = "facts.json"  # name of the array that holds the facts as text
_DAMAGE = (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile)
_LOADER = ("uid", "prompt")  # fields that the data give again
_ACCOUNT = "perf/"  # metrics of sampling itself, which a replay does not do

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A step that was trained in partial batches, as one process saw it."""

    step: int
    partial_batches: tuple[PartialBatch, ...]
    groups: tuple[Group, ...]  # of this process, by counter
    end: int  # the first counter that the step did not look at
    metrics: Metrics  # of the nodes that ran ahead, over all processes

    @property
    def counters(self) -> tuple[int, ...]:
        """The counters that the step trained on, rising, of all processes."""
        return tuple(sorted(c for batch in self.partial_batches for c in batch.counters))


# -- writing ---------------------------------------------------------------------------------------


class RecordWriter:
    """Records the groups that a run trains on.

    Call `wait` before a checkpoint: a run that resumes from it needs the records before it.
    """

    def __init__(self, folder: pathlib.Path, resume_step: int, start: Mapping[str, Any] | None):
        """Collective. Records of steps after `resume_step`, by an earlier start, are dropped.

        `start`: JSON values that a replay must have alike; None: groups are not kept.
        """
        self._folder, self._first = folder, not processes.process_index()
        count = processes.process_count()
        self._start = None if start is None else {"processes": count, **start}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._writing: list[Future[None]] = []
        self._partial_batches: list[PartialBatch] = []  # of the step
        self._groups: list[Group] = []  # of this process, in these partial batches
        if self._first:
            if (folder / FILE).exists():
                truncate_metrics(folder / FILE, resume_step)
            for place in (folder / FOLDER).glob("*"):
                if place.name.isdigit() and int(place.name) > resume_step:
                    shutil.rmtree(place)
        processes.all_gather_ints(np.int64(resume_step))  # nobody writes before

    def write(
        self,
        partial_batch: PartialBatch,
        groups: Sequence[Group] = (),
        *,
        rows: int,
        room: int,
        waited: float = 0.0,
    ) -> None:
        """Appends a partial batch, which lies in so many rows of so many; this process has `groups`
        of it."""
        if self._start is not None:
            self._partial_batches.append(partial_batch)
            self._groups += groups
        if self._first:
            line = _line(partial_batch) | {"rows": rows, "room": room, "waited": round(waited, 4)}
            append(self._folder / FILE, json.dumps(line) + "\n")

    def finish(self, step: int, end: int, metrics: Metrics) -> None:
        """Begins to write the groups of a step's partial batches, see StepRecord. Raises the error
        of a step before, OSError if it is a disk's."""
        while self._writing and (self._writing[0].done() or len(self._writing) >= MOST_UNWRITTEN):
            self._writing.pop(0).result()
        groups = sorted(self._groups, key=lambda group: group.counter)
        record = StepRecord(step, tuple(self._partial_batches), tuple(groups), end, metrics)
        self._partial_batches, self._groups = [], []
        if self._start is not None:
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
        arrays, facts = _to_arrays(record)
        text = json.dumps(facts | {"start": self._start}).encode()
        path = _path(self._folder, record.step, processes.process_index())
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


def _line(partial_batch: PartialBatch) -> dict[str, Any]:
    groups = partial_batch.groups
    spans = [version for group in groups for version in (group.first, group.last)]
    return {
        "step": partial_batch.step,
        "partial_batch": partial_batch.number,
        "mini_batch": partial_batch.mini_batch,
        "counters": list(partial_batch.counters),
        "tokens": sum(group.tokens(shared=True) for group in groups),
        "sequences": sum(len(group.responses) for group in groups),
        "versions": [min(spans), max(spans)] if spans else [],
        "last": partial_batch.last,
    }


# -- reading ---------------------------------------------------------------------------------------


class Recording:
    """The recording of a run, read by one process of the same number of processes.

    Attributes:
      folder: the run's.
      last: the last step that all processes have recorded.
      starts: (step, JSON values given to the RecordWriter of its start), for the first step and
        each step where the values change.
    """

    def __init__(self, folder: pathlib.Path, done: int, process: int, count: int):
        """Opens the records of the steps after `done`.

        Raises ValueError if there are none, one is missing or cannot be read, or they are those of
        another number of processes than `count`.
        """
        self.folder, self._process = folder, process
        self.starts: list[tuple[int, dict[str, Any]]] = []
        found, everyone = _writers_by_step(folder), {*range(count)}
        if not found:
            raise ValueError(
                f"--replay={str(folder)!r} has no records of partial batches, "
                f"{FOLDER}/STEP/PROCESS.npz: give the folder of a run with stream.record=True"
            )
        whole = [step for step, writers in found.items() if step > done and writers >= everyone]
        # records beyond the last whole one are of a run that was killed while it wrote them
        self.last = max(whole, default=max(found))
        for step in range(done + 1, self.last + 1):
            writers = found.get(step, set())
            if writers:
                self._open(step, process if process in writers else min(writers), count)
            if lacking := sorted(everyone - writers):
                raise ValueError(
                    f"--replay={str(folder)!r} lacks {_path(folder, step, lacking[0])}: it has "
                    f"records of steps {min(found)} to {max(found)}, and the replay needs all from "
                    f"step {done + 1} on"
                )

    def read(
        self, step: int, writers: Mapping[str | None, Layout], prompt: Callable[[int], Prompt]
    ) -> StepRecord:
        """This process's record of a step. ValueError if it cannot be read.

        `writers`: layouts of the plan's nodes; `prompt(counter)`: of the data, ValueError if it has
        other tokens than the recorded one.
        """
        path = _path(self.folder, step, self._process)
        with _reading(path), np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
            facts = json.loads(arrays[_FACTS].tobytes())
            given = {g["counter"]: arrays.get(f"{i}.prompt") for i, g in enumerate(facts["groups"])}
        prompts = {counter: _checked(prompt(counter), tokens) for counter, tokens in given.items()}
        with _reading(path):
            return _from_arrays(arrays, facts, writers, prompts)

    def _open(self, step: int, process: int, count: int) -> None:
        """Reads what the record of a step says of its start."""
        path = _path(self.folder, step, process)
        with _reading(path), np.load(path, allow_pickle=False) as file:
            start = json.loads(file[_FACTS].tobytes())["start"]
            recorders = int(start["processes"])
        if recorders != count:
            raise ValueError(
                f"--replay={str(self.folder)!r}: step {step} was recorded by {recorders} "
                f"processes, and this job has {count}: start it with as many"
            )
        if not self.starts or self.starts[-1][1] != start:
            self.starts.append((step, start))


class PartialBatchReplay:
    """Passes a step's recorded groups to the training, one partial batch after another."""

    def __init__(
        self,
        recording: Recording,
        records: RecordWriter,
        *,
        steps: StepGroups,
        read: Callable[[int], StepRecord],
    ):
        """`records`: of this run; `steps`: joins the groups; `read(step)`: of the recording."""
        self._recording, self._records = recording, records
        self._steps, self._read = steps, read
        self._record = StepRecord(0, (), (), 0, {})  # of the present step
        self._left: deque[PartialBatch] = deque()  # its partial batches
        self._other: list[Group] = []  # any group, for the columns of a partial batch without one

    def take(self, step: int) -> tuple[PartialBatch, FieldStore]:
        """The next partial batch of a step, and the fields of this process's groups in it.

        Raises Ended after the last step of the recording, ValueError for a record that cannot
        be read.
        """
        if not self._left:
            if step > self._recording.last:
                folder = self._recording.folder
                raise Ended(DATA_ENDED, fix=f"{folder} has no whole record of a later one")
            self._record = self._read(step)
            self._left = deque(self._record.partial_batches)
        partial_batch = self._left.popleft()
        counters = partial_batch.counters
        return partial_batch, self._steps.fields(step, counters, self._mine(counters))

    def record(self, partial_batch: PartialBatch, *, rows: int, room: int) -> None:
        """Records a partial batch that was taken last, whose groups lie in so many rows of so
        many."""
        self._records.write(partial_batch, rows=rows, room=room)

    def end(self) -> tuple[FieldStore, Metrics]:
        """The fields of all of this process's groups in the step, whose last partial batch was
        taken, and recorded metrics of the nodes that ran on them."""
        record = self._record
        start = min(record.counters, default=record.end)
        cut = Cut(record.step, start, record.end, record.counters, final=True)
        return self._steps.join(cut, self._mine(record.counters), record.metrics)

    def finish(self, step: int) -> int:
        """Ends a step; returns the first counter that it did not look at."""
        return self._record.end

    def _mine(self, counters: Collection[int]) -> list[Group]:
        """This process's groups of some counters; without one, any group of the recording."""
        mine = [group for group in self._record.groups if group.counter in counters]
        if not (mine or self._other):
            steps = range(self._record.step, self._recording.last + 1)
            found = (self._read(step).groups[:1] for step in steps)
            self._other = list(next(filter(None, found), ()))
        self._other = mine[:1] or self._other
        return mine or self._other


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """A block that reads a record: its errors name the file."""
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged, or another "
            "version of distflow_jax wrote it; copy it again, or record the run again"
        ) from error


def _writers_by_step(folder: pathlib.Path) -> dict[int, set[int]]:
    """The processes that have a record of each step."""
    found: dict[int, set[int]] = {}
    for path in (folder / FOLDER).glob("*/*.npz"):
        if path.stem.isdigit() and path.parent.name.isdigit():
            found.setdefault(int(path.parent.name), set()).add(int(path.stem))
    return found


def _path(folder: pathlib.Path, step: int, process: int) -> pathlib.Path:
    return folder / FOLDER / str(step) / f"{process}.npz"


# -- a step as arrays ------------------------------------------------------------------------------


def _to_arrays(record: StepRecord) -> tuple[Arrays, dict[str, Any]]:
    """A record as (arrays by name, JSON values).

    Raises ValueError for a column with an entry that is no array or number.
    """
    arrays: Arrays = {}
    groups = []
    for place, group in enumerate(record.groups):
        store, columns = group.store, []
        for (source, field), value in store.values.items():
            if source is not None or field not in _LOADER:
                name = f"{place}.{len(columns)}"
                try:
                    kind, arrays[name] = packed_column(value, field)
                except ValueError as error:
                    text = f"stream.record keeps arrays and numbers alone: {error}"
                    raise ValueError(text) from error
                columns.append([source, field, kind])
        arrays |= {f"{place}.uid": store.uid, f"{place}.own": store.own}
        if len(store.own):
            arrays[f"{place}.prompt"] = store.columns["prompt"][0].tokens
        facts = {"counter": group.counter, "columns": columns, "sources": dict(store.sources)}
        groups.append(facts)
    return arrays, {
        "step": record.step,
        "end": record.end,
        "groups": groups,
        "partial_batches": [_to_json(batch) for batch in record.partial_batches],
        "metrics": {
            name: _number(value)
            for name, value in record.metrics.items()
            if not name.startswith(_ACCOUNT)
        },
    }


def _from_arrays(
    arrays: Arrays,
    facts: Mapping[str, Any],
    writers: Mapping[str | None, Layout],
    prompts: Mapping[int, Prompt],
) -> StepRecord:
    """Inverse of `_to_arrays`; `prompts` by counter."""
    groups = []
    for place, group in enumerate(facts["groups"]):
        counter = group["counter"]
        uid, own = arrays[f"{place}.uid"], arrays[f"{place}.own"]
        values: dict[tuple[str | None, str], Any] = {
            (None, "uid"): uid[own],
            (None, "prompt"): [prompts[counter]] * len(own),
        }
        for number, (source, field, kind) in enumerate(group["columns"]):
            values[source, field] = unpacked_column(kind, arrays[f"{place}.{number}"])
        store = FieldStore(writers, uid, own, values)
        store.sources = dict(group["sources"])
        store.columns = {field: values[source, field] for field, source in store.sources.items()}
        groups.append(Group(counter, store, set(), done=True))
    batches = tuple(_from_json(facts["step"], batch) for batch in facts["partial_batches"])
    return StepRecord(facts["step"], batches, tuple(groups), facts["end"], facts["metrics"])


def _to_json(partial_batch: PartialBatch) -> dict[str, Any]:
    return {
        "number": partial_batch.number,
        "mini_batch": partial_batch.mini_batch,
        "ends": partial_batch.ends_mini_batch,
        "last": partial_batch.last,
        "groups": [[group.buffer, group.to_json()] for group in partial_batch.groups],
    }


def _from_json(step: int, batch: Mapping[str, Any]) -> PartialBatch:
    return PartialBatch(
        step,
        batch["number"],
        batch["mini_batch"],
        tuple(GroupFacts.from_json(buffer, row) for buffer, row in batch["groups"]),
        bool(batch["ends"]),
        bool(batch["last"]),
    )


def _checked(prompt: Prompt, tokens: np.ndarray | None) -> Prompt:
    """The prompt, whose recorded tokens are int32 [P]; None: no response was kept."""
    if tokens is not None and not np.array_equal(prompt.tokens, tokens):
        raise ValueError(
            f"prompt {prompt.counter} has other tokens than in the recorded run: its data have "
            "changed since; restore them"
        )
    return prompt


def _number(value: Any) -> int | float:
    return int(value) if isinstance(value, int | np.integer) else float(value)
