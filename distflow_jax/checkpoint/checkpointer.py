"""Checkpoints of a run: arrays and a JSON record per step, written by Orbax in the background.

    FOLDER/STEP/             a finished checkpoint, readable on any mesh and number of processes
    FOLDER/STEP/additions/   what processes add to it later: without these it is not complete
    FOLDER/STEP.*-tmp*       an unfinished one: the run ended while it was written
    FOLDER/STEP.unreadable   a damaged one, renamed so that its step can be saved again

Reading changes nothing in the folder, so that a live run's checkpoints can be read: the first save
removes unfinished checkpoints and renames damaged ones. This is the only module that uses Orbax.
"""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from distflow_jax.checkpoint import additions, checksums
from distflow_jax.checkpoint.additions import AdditionWriter
from distflow_jax.cluster import processes
from distflow_jax.config.upkeep_config import CheckpointConfig

ITEMS = ("arrays", "record")
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's messages
ArrayTable = dict[str, list]  # name -> [shape, dtype name]
_STEP = re.compile(r"0|[1-9][0-9]{0,9}")
MAX_LISTED = 5  # differences named in an error
_UNCHECKED = "it has no checksums, and flipped bits in it would not be seen"

log = logging.getLogger("distflow_jax")


class Contents(NamedTuple):
    """The record of a checkpoint: names of its arrays, and its info."""

    step: int
    arrays: ArrayTable
    info: dict[str, Any]  # that of Checkpointer.save


class Checkpointer:
    """Saves and restores the state of a run below `folder` (a path that all processes see).

    `save`, `restore`, `latest`, `wait` and `close` are collective: all processes call them in the
    same order. Every process writes its own shards; process 0 writes the record.

    Attributes:
      folder: of all checkpoints.
      additions: writes what this process adds to checkpoints that were saved with `added_to`.
    """

    def __init__(self, folder: str | os.PathLike, config: CheckpointConfig):
        quiet_orbax()
        # Orbax uses barriers of this kind: compile them here instead of in the middle of the run
        processes.barrier("checkpointer")
        self.folder = epath.Path(os.path.abspath(folder))
        self.additions = AdditionWriter(self.folder)
        self._keep = config.keep
        self._is_first = processes.process_index() == 0
        self._unreadable: set[int] = set()
        options = ocp.options.MultiprocessingOptions(primary_host=0)
        _leave_out_late_writes()
        self._saving: epath.Path | None = None  # the last checkpoint saved here; None: none yet
        self._added_by = 0  # processes that will add to it
        # the callback runs in process 0 before a checkpoint gets its final name
        self._writer = ocp.AsyncCheckpointer(
            _handler(options),
            async_options=ocp.AsyncOptions(
                post_finalization_callback=lambda: _finish(self._saving, self._added_by)
            ),
            multiprocessing_options=options,
        )
        # Each process reads by itself, without Orbax's barriers: a process that cannot read its
        # shards would leave the others waiting there. `restore` compares the outcomes.
        me = processes.process_index()
        options = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"reader{me}"
        )
        self._reader = ocp.Checkpointer(_handler(options), multiprocessing_options=options)

    def save(
        self, step: int, arrays: Any, info: Mapping[str, Any], *, added_to: bool = False
    ) -> None:
        """Starts to write a checkpoint; returns once the arrays are copied to the host.

        A checkpoint gets its name when it is complete: a killed run has the one before. Waits for
        the previous save and raises its error (a full disk). During the write there is one
        checkpoint more than `keep`.

        Args:
          step: name of the checkpoint.
          arrays: pytree of jax.Arrays of any shape, which may be donated after the call.
          info: JSON values, equal on all processes.
          added_to: whether every process will add to it by `additions`: until then the checkpoint
            is not complete.

        Raises:
          ValueError: there is a checkpoint of this step already.
        """
        if self._saving is None or self._unreadable:
            self._tidy_up()
        self.wait()
        if (self.folder / str(step)).exists():
            raise ValueError(f"there is a checkpoint of step {step} in {self.folder} already")
        self._saving = self.folder / str(step)
        flat = _flatten(arrays)
        self._added_by = processes.process_count() if added_to else 0
        record = {"arrays": _table(flat), "info": dict(info), "additions": self._added_by}
        self._writer.save(
            self._saving,
            args=ocp.args.Composite(arrays=_Save(flat), record=ocp.args.JsonSave(record)),
        )

    def check(self) -> None:
        """Raises the error of a save that has failed in the background, OSError if it is a disk's.

        Not collective.
        """
        with self._disk_errors():
            self._writer.check_for_errors()

    def wait(self) -> None:
        """Waits for the save in flight; after one, removes the checkpoints beyond `keep`.

        Raises the error of that save, OSError if it is a disk's.
        """
        with self._disk_errors():
            self._writer.wait_until_finished()
        if self._is_first and self._saving is not None:
            complete = self._complete_steps()
            for step in self._steps_on_disk() if complete else []:
                if step < min(complete[-self._keep :]):
                    (self.folder / str(step)).rmtree()

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None without one."""
        steps = self._steps()
        return steps[-1] if steps else None

    def contents(self, step: int | None) -> Contents:
        """The record of a checkpoint; None is the newest. Reads no array. Not collective.

        Raises:
          FileNotFoundError: there is no such checkpoint; the message lists the existing steps.
          ValueError: the checkpoint cannot be read.
        """
        steps = self._steps_on_disk()
        self._check_step(step, steps)
        found = steps[-1] if step is None else step
        failure, record = checksums.quick_damage(self.folder / str(found), "record"), {}
        if not failure:
            record, failure = self._record(self.folder / str(found))
        if failure:
            raise _unreadable(self.folder, found, failure, steps)
        return Contents(found, record["arrays"], record["info"])

    def digest(self, step: int) -> str:
        """Hex digest of a checkpoint, by the checksums of its files."""
        return checksums.digest(self.folder / str(step))

    def restore(
        self,
        step: int | None,
        abstract: Any,
        *,
        partial: bool = False,
        verify: bool = True,
        lacking: Callable[[Mapping[str, Any]], str] = lambda info: "",
        differing: Callable[[Contents], str] = lambda contents: "",
    ) -> tuple[int, Any, dict[str, Any]]:
        """Reads one checkpoint.

        Args:
          step: step of the checkpoint. None is the newest complete one that can be read, with a
            warning for each newer one; the next save removes incomplete ones, and renames others
            to STEP.unreadable.
          abstract: pytree of jax.ShapeDtypeStruct with shardings. Arrays are returned in its
            structure and layout, whatever the layout in which they were saved.
          partial: whether the checkpoint may hold more arrays than `abstract`.
          verify: whether the files are verified; False for all but the first of several readings.
          lacking: info -> what else a checkpoint of an older version lacks and what follows, or "".
          differing: contents -> settings that are not those it was saved with, or "". It is asked
            before the arrays are compared.

        Returns:
          (step, arrays, info). Process 0 warns once of a checkpoint of an older version.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          ValueError: the checkpoint holds other arrays than `abstract` (of another model or
            optimizer), or is of other settings, or none can be read.
        """
        steps = self._steps(complete=step is None)
        self._check_step(step, steps)
        unreadable: dict[int, str] = {}
        for candidate in reversed(steps) if step is None else [step]:
            path = self.folder / str(candidate)
            damage = _damage(path, complete=step is None) if verify else ""
            failures = processes.all_gather_text(damage)
            result, mismatches = None, []
            if not any(failures):
                result, mismatch, failure = self._read(path, abstract, partial, differing)
                mismatches = processes.all_gather_text(mismatch)
                failures = processes.all_gather_text(failure)
            if any(mismatches):
                raise ValueError(
                    f"checkpoint {candidate} in {self.folder} is not of this model and optimizer: "
                    f"{next(filter(None, mismatches))}. Use the config it was saved with, "
                    "or another --workdir"
                )
            if not any(failures):
                self._report(unreadable, candidate)
                if verify and self._is_first:
                    _warn_of_age(path, lacking(result[1]))
                return candidate, *result
            unreadable[candidate] = "; ".join(
                f"process {index}: {text}" if len(failures) > 1 else text
                for index, text in enumerate(failures)
                if text
            )
        if step is not None:
            raise _unreadable(self.folder, step, unreadable[step], steps)
        reasons = "; ".join(f"step {s}: {reason}" for s, reason in unreadable.items())
        raise ValueError(
            f"no checkpoint in {self.folder} can be read ({reasons}). "
            "Remove the folder to start from step 0"
        )

    def close(self) -> None:
        """Waits for the save in flight and what is added to it; ends the background threads."""
        with contextlib.ExitStack() as stack:  # the last one first, all of them in any case
            for thread in (self._reader, self._writer, self.additions):
                stack.callback(thread.close)
            self.wait()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """A block in which TensorStore's words for an error of the system become that error."""
        try:
            yield
        except (ValueError, RuntimeError) as error:
            if found := _OS_ERROR.search(str(error)):
                number = int(found[1])
                raise OSError(number, os.strerror(number), str(self._saving)) from error
            raise

    def _steps(self, *, complete: bool = True) -> list[int]:
        """Steps of checkpoints as process 0 sees them, equal on all processes."""
        steps = self._complete_steps if complete else self._steps_on_disk
        text = ",".join(map(str, steps())) if self._is_first else ""
        agreed = processes.all_gather_text(text)[0]
        return [int(word) for word in agreed.split(",") if word]

    def _steps_on_disk(self) -> list[int]:
        if not self.folder.exists():
            return []
        found = [step_of(path.name) for path in self.folder.iterdir() if path.is_dir()]
        return sorted(step for step in found if step is not None)

    def _complete_steps(self) -> list[int]:
        """Steps of checkpoints to which nothing has still to be added."""
        steps = self._steps_on_disk()
        return [step for step in steps if not additions.lacking(self.folder / str(step))]

    def _check_step(self, step: int | None, steps: list[int]) -> None:
        if not steps or (step is not None and step not in steps):
            which = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(f"no {which} in {self.folder}; there are: {steps or 'none'}")

    def _item(self, path: epath.Path, name: str, args: ocp.args.CheckpointArgs) -> tuple[Any, str]:
        """(one of ITEMS, "") of a checkpoint, or (None, the reason why it cannot be read)."""
        try:
            found = self._reader.restore(path, args=ocp.args.Composite(**{name: args}))[name]
            return jax.block_until_ready(found), ""
        # Broad on purpose: each layer below (Orbax, TensorStore, json, the file system) has its own
        # exceptions for damaged data. The reason is reported, and fatal without another checkpoint.
        except Exception as error:
            return None, _reason(error)

    def _record(self, path: epath.Path) -> tuple[Any, str]:
        """(record, "") of a checkpoint, or (None, the reason why it cannot be read)."""
        record, failure = self._item(path, "record", ocp.args.JsonRestore())
        if not failure and {"arrays", "info"} - set(record):
            return None, "its record has no arrays or no info"
        return record, failure

    def _read(
        self, path: epath.Path, abstract: Any, partial: bool, differing: Callable[[Contents], str]
    ) -> tuple[Any, str, str]:
        """((arrays, info), differences from what is wanted, reason why it cannot be read)."""
        flat = _flatten(abstract)
        record, failure = self._record(path)
        failure = failure or additions.miscounted(path, record.get("additions", 0))
        if failure:
            return None, "", failure
        mismatch = differing(Contents(int(path.name), record["arrays"], record["info"]))
        mismatch = mismatch or _differences(record["arrays"], _table(flat), partial)
        if mismatch:
            return None, mismatch, ""
        restored, failure = self._item(path, "arrays", _restore_args(flat, partial))
        if failure:
            return None, "", failure
        leaves = [restored[name] for name in flat]
        arrays = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        return (arrays, record["info"]), "", ""

    def _report(self, unreadable: Mapping[int, str], fallback: int) -> None:
        self._unreadable = set(unreadable)
        if self._is_first:
            newer = [step for step in self._steps_on_disk() if step > fallback]
            unreadable = dict(unreadable) | {
                step: lacking
                for step in newer
                if (lacking := additions.lacking(self.folder / str(step)))
            }
            for step, reason in unreadable.items():
                log.warning(
                    "checkpoint %d in %s cannot be read (%s); continuing from checkpoint %d",
                    step,
                    self.folder,
                    reason,
                    fallback,
                )

    def _tidy_up(self) -> None:
        """Removes unfinished and incomplete checkpoints and renames unreadable ones, before the
        first save."""
        if self._is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.iterdir():
                if ".orbax-checkpoint-tmp" in path.name and path.is_dir():
                    path.rmtree()
            for step in self._steps_on_disk():
                if lacking := additions.lacking(self.folder / str(step)):
                    log.warning("checkpoint %d is removed: %s", step, lacking)
                    (self.folder / str(step)).rmtree()
            for step in self._unreadable:
                target = self.folder / f"{step}.unreadable"
                if target.exists():
                    target.rmtree()
                (self.folder / str(step)).rename(target)
        self._unreadable = set()
        processes.all_gather_text("tidy")  # a barrier: no process saves before names are free


def _unreadable(folder: epath.Path, step: int, reason: str, steps: list[int]) -> ValueError:
    others = [other for other in steps if other != step]
    there = f"the others are: {others}" if others else "there is no other"
    return ValueError(f"checkpoint {step} in {folder} cannot be read ({reason}); {there}")


def _damage(checkpoint: epath.Path, *, complete: bool) -> str:
    """Damage in this process's share of the files; "" if there is none.

    `complete`: whether what was added to the checkpoint counts too.
    """
    added, failure = additions.checksum_table(checkpoint) if complete else ({}, "")
    mine = processes.process_index(), processes.process_count()
    return failure or checksums.damage(checkpoint, *mine, added)


def _warn_of_age(checkpoint: epath.Path, lacking: str) -> None:
    """Warns, once for all that it lacks, of a checkpoint of an older version."""
    unchecked = "" if checksums.has_checksums(checkpoint) else _UNCHECKED
    if found := "; ".join(filter(None, [unchecked, lacking])):
        log.warning("checkpoint %s was written by an older version: %s", checkpoint, found)


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None for a name that no checkpoint has, as 007 or ²."""
    return int(name) if _STEP.fullmatch(name) else None


def quiet_orbax() -> None:
    """Drops the DEBUG and INFO messages that Orbax logs through absl, not its warnings.

    Exceptions of its threads are dropped too: they are raised where the save is awaited.
    """
    logger = logging.getLogger("absl")
    if not any(isinstance(item, _OrbaxFilter) for item in logger.filters):
        logger.addFilter(_OrbaxFilter())


class _OrbaxFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:
            return True
        return record.levelno >= logging.WARNING and not record.exc_info


def _handler(options: ocp.options.MultiprocessingOptions) -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        arrays=_ArrayHandler(
            multiprocessing_options=options,
            # replica-parallel saves would compile a slice per shape in the middle of the run
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (
                    jax.Array,
                    ocp.type_handlers.ArrayHandler(
                        primary_host=options.primary_host, use_replica_parallel=False
                    ),
                )
            ),
        ),
        record=ocp.JsonCheckpointHandler(multiprocessing_options=options),
    )


def _finish(checkpoint: epath.Path, added_by: int) -> None:
    """Writes checksums.json of a whole checkpoint, which may still have its temporary name.

    `added_by`: processes that will add to it.
    """
    folder = checkpoint
    if not folder.exists():
        (folder,) = checkpoint.parent.glob(f"{checkpoint.name}.orbax-checkpoint-tmp*")
    parts = {
        part: index
        for index in range(processes.process_count())
        if (part := _part_of(folder / "arrays", index)).exists()
    }
    checksums.write(folder, ITEMS, parts)
    if added_by:
        additions.announce(folder, added_by)


def _part_of(arrays: epath.Path, index: int) -> epath.Path:
    """The folder of the files that a process wrote (Orbax's OCDBT driver); it may have none."""
    return arrays / f"ocdbt.process_{index}"


class _ArrayHandler(ocp.PyTreeCheckpointHandler):
    """Saves arrays; each process computes the checksums of its files before the commit."""

    async def async_save(self, directory, *args, **kwargs):
        """Saves as Orbax does; the last of the futures ends with the checksums."""
        written = await super().async_save(directory, *args, **kwargs)
        # Orbax waits for the futures one after the other
        return [*(written or []), _Checksums(directory)]


# Orbax finds the handler of an argument by the argument's class
@ocp.args.register_with_handler(_ArrayHandler, for_save=True)
class _Save(ocp.args.PyTreeSave):
    """Arrays to save with checksums."""


@ocp.args.register_with_handler(_ArrayHandler, for_restore=True)
class _Restore(ocp.args.PyTreeRestore):
    """Arrays to restore."""


def _restore_args(flat: Mapping[str, jax.ShapeDtypeStruct], partial: bool) -> _Restore:
    restore_args = ocp.checkpoint_utils.construct_restore_args(dict(flat))
    return _Restore(item=dict(flat), restore_args=restore_args, partial_restore=partial)


class _Checksums:
    """A future of Orbax's: the checksums of this process's files, computed when it is awaited."""

    def __init__(self, directory: Any):
        self._directory = epath.Path(getattr(directory, "path", directory))

    def result(self, timeout: float | None = None) -> None:
        """Computes and writes the checksums."""
        del timeout
        index = processes.process_index()
        if (folder := _part_of(self._directory, index)).exists():
            checksums.write_part(folder, index)

    def cancel(self) -> None:
        """Does nothing: there is nothing to stop before `result`."""


def _flatten(tree: Any) -> dict[str, Any]:
    """{"opt.0.mu.embed": leaf}: unlike Orbax's trees, names do not depend on container types."""
    leaves = jax.tree.leaves_with_path(tree)
    flat = {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of the tree share a name"
    return flat


def _table(flat: Mapping[str, Any]) -> ArrayTable:
    return {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in flat.items()}


def _differences(saved: ArrayTable, wanted: ArrayTable, partial: bool) -> str:
    """The differences of two tables in one line; "" without any.

    `partial`: whether more may be saved than is wanted.
    """
    both = saved.keys() & wanted.keys()
    saved = {name: saved[name] for name in saved if name in both or not partial}
    sections = {
        "only in the checkpoint": [n for n in saved if n not in both],
        "not in the checkpoint": [n for n in wanted if n not in both],
        "of another shape or type": [
            f"{n} (saved {_type(saved[n])}, here {_type(wanted[n])})"
            for n in saved
            if n in both and saved[n] != wanted[n]
        ],
    }
    texts = []
    for title, names in sections.items():
        if names:
            more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            texts.append(f"{title}: {', '.join(names[:MAX_LISTED])}{more}")
    return "; ".join(texts)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _type(entry: list) -> str:
    shape, dtype = entry
    return f"{dtype}[{','.join(map(str, shape))}]"


def _leave_out_late_writes() -> None:
    """Leaves out of stderr and of the log what follows from a save that failed.

    The error itself is raised, once. Orbax closes its event loop at the first array that cannot be
    written. Of every other array of that checkpoint TensorStore then reports to the closed loop,
    for which Python prints a traceback, or asyncio logs that nobody took the error.
    """
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_is_news)


class _Hook:
    """A sys.unraisablehook before another one."""

    def __init__(self, other: Callable[[Any], object]):
        self._other = other

    def __call__(self, found: Any) -> None:
        late = isinstance(found.exc_value, RuntimeError) and found.object is None
        if not (late and str(found.exc_value) == "Event loop is closed"):
            self._other(found)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message of asyncio says more than that an array was not written."""
    error = record.exc_info[1] if record.exc_info else None
    late = "never retrieved" in record.getMessage() and isinstance(error, ValueError)
    return not (late and "Error writing" in str(error))
