"""Checkpoints of a run: arrays and a JSON record per step, written by Orbax in the background.

    FOLDER/STEP/             a finished checkpoint, readable on any mesh and number of processes
    FOLDER/STEP.*-tmp*       one that was being written when the run ended
    FOLDER/STEP.unreadable   one that could not be read, set aside so that its step can be redone

Who only reads, from the folder of a live run for instance, changes nothing in it: what is left over
is removed or set aside by the first save. The only file that knows Orbax.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from distflow_jax.parallel import processes

ITEMS = ("arrays", "record")
SIZES_FILE = "sizes.json"  # {file: bytes}: tells damage at a glance, and by the file's name
ArrayTable = dict[str, list]  # name -> [shape, dtype name]
MAX_LISTED = 5  # differences named in an error

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, and how many stay."""

    every: int = 10  # steps between checkpoints; the last step and SIGTERM write one too
    keep: int = 2  # finished checkpoints that stay; from 2 on, one can be lost

    def __post_init__(self):
        if self.every < 1:
            raise ValueError(f"checkpoint.every must be at least 1 step, got {self.every}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {self.keep}")


class Checkpointer:
    """Saves and restores the state of a run below `folder` (a path that all processes see).

    `save`, `restore`, `latest`, `wait` and `close` are collective: all processes call them in the
    same order. Every process writes its own shards; the record is that of process 0.
    """

    def __init__(self, folder: str | os.PathLike, config: CheckpointConfig):
        quiet_orbax()
        # Orbax waits at barriers of this kind: compiled here instead of in mid-run
        processes.barrier("checkpointer")
        self._folder = epath.Path(os.path.abspath(folder) if "://" not in str(folder) else folder)
        self._keep = config.keep
        self._is_first = processes.process_index() == 0
        self._unreadable: set[int] = set()
        options = ocp.options.MultiprocessingOptions(primary_host=0)
        self._saving: epath.Path | None = None  # the last one saved here; None: has only read
        # The callback runs in process 0 before a checkpoint gets its final name.
        self._writer = ocp.AsyncCheckpointer(
            _handler(options),
            async_options=ocp.AsyncOptions(
                post_finalization_callback=lambda: _write_sizes(self._saving)
            ),
            multiprocessing_options=options,
        )
        # Reading is each process's own affair, without Orbax's barriers: a process that cannot read
        # its share would leave the others waiting there. `restore` compares the outcomes itself.
        me = processes.process_index()
        options = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"reader{me}"
        )
        self._reader = ocp.Checkpointer(_handler(options), multiprocessing_options=options)

    def save(self, step: int, arrays: Any, info: Mapping[str, Any]) -> None:
        """Starts writing a checkpoint and returns once the arrays are copied to the host.

        `arrays` is a pytree of jax.Arrays; they may be donated as soon as this returns. `info` is
        of JSON values and equal on all processes. The checkpoint appears under its name when it is
        complete, so a kill leaves the one before. Waits for the save before it, and raises what
        went wrong there (a full disk). While it is being written, there is one more than `keep`.

        Raises ValueError if there is a checkpoint of this step already.
        """
        if self._saving is None or self._unreadable:
            self._tidy_up()
        self.wait()
        if (self._folder / str(step)).exists():
            raise ValueError(f"there is a checkpoint of step {step} in {self._folder} already")
        self._saving = self._folder / str(step)
        flat = _flatten(arrays)
        record = {"arrays": _table(flat), "info": dict(info)}
        self._writer.save(
            self._saving,
            args=ocp.args.Composite(
                arrays=ocp.args.PyTreeSave(flat), record=ocp.args.JsonSave(record)
            ),
        )

    def wait(self) -> None:
        """Returns when the save under way is complete; after one, removes those beyond `keep`."""
        self._writer.wait_until_finished()
        if self._is_first and self._saving is not None:
            for step in self._steps_on_disk()[: -self._keep]:
                (self._folder / str(step)).rmtree()

    def latest(self) -> int | None:
        """Step of the newest finished checkpoint, None without one."""
        steps = self._steps()
        return steps[-1] if steps else None

    def contents(self, step: int | None) -> tuple[int, ArrayTable]:
        """(step, {array's name: [shape, dtype name]}) of a checkpoint, the newest one for None.

        Reads no array, and is this process's own affair. Raises FileNotFoundError, with the steps
        that there are, if there is none, and ValueError if it cannot be read.
        """
        steps = self._steps_on_disk()
        self._check_step(step, steps)
        found = steps[-1] if step is None else step
        failure, record = _damage(self._folder / str(found)), {}
        if not failure:
            record, failure = self._record(self._folder / str(found))
        if failure:
            raise ValueError(
                f"checkpoint {found} in {self._folder} cannot be read ({failure}); there are: "
                f"{steps}"
            )
        return found, record["arrays"]

    def restore(
        self, step: int | None, abstract: Any, *, partial: bool = False
    ) -> tuple[int, Any, dict[str, Any]]:
        """Reads one checkpoint: (step, arrays, info).

        `abstract` is a pytree of jax.ShapeDtypeStruct with shardings; the arrays come back in its
        structure and layout, whatever the layout they were saved in. With `step` None the newest
        checkpoint is read, or, with a warning, the newest one that can be read; the next save
        renames the unreadable ones to STEP.unreadable. With `partial` the checkpoint may hold more
        than is asked for, and only that is read.

        Raises FileNotFoundError if there is none, and ValueError if the checkpoint holds other
        arrays than `abstract` (another model or optimizer), or if none can be read.
        """
        steps = self._steps()
        self._check_step(step, steps)
        unreadable: dict[int, str] = {}
        for candidate in reversed(steps) if step is None else [step]:
            path = self._folder / str(candidate)
            failures = processes.all_gather_text(_damage(path) if self._is_first else "")
            result, mismatches = None, []
            if not any(failures):
                result, mismatch, failure = self._read(path, abstract, partial)
                mismatches = processes.all_gather_text(mismatch)
                failures = processes.all_gather_text(failure)
            if any(mismatches):
                raise ValueError(
                    f"checkpoint {candidate} in {self._folder} is not of this model and optimizer: "
                    f"{next(filter(None, mismatches))}. Use the config it was saved with, "
                    "or another --workdir"
                )
            if not any(failures):
                self._report(unreadable, candidate)
                return candidate, *result
            unreadable[candidate] = "; ".join(
                f"process {index}: {text}" if len(failures) > 1 else text
                for index, text in enumerate(failures)
                if text
            )
        reasons = "; ".join(f"step {s}: {reason}" for s, reason in unreadable.items())
        raise ValueError(
            f"no checkpoint in {self._folder} can be read ({reasons}). "
            "Remove the folder to start from step 0"
        )

    def close(self) -> None:
        """Waits for the save under way and ends the background threads."""
        self.wait()
        self._writer.close()
        self._reader.close()

    def _steps(self) -> list[int]:
        """Finished checkpoints as process 0 sees them, the same list on all processes."""
        text = ",".join(map(str, self._steps_on_disk())) if self._is_first else ""
        agreed = processes.all_gather_text(text)[0]
        return [int(word) for word in agreed.split(",") if word]

    def _steps_on_disk(self) -> list[int]:
        if not self._folder.exists():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

    def _check_step(self, step: int | None, steps: list[int]) -> None:
        if not steps or (step is not None and step not in steps):
            which = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(f"no {which} in {self._folder}; there are: {steps or 'none'}")

    def _record(self, path: epath.Path) -> tuple[Any, str]:
        """(record, why it cannot be read)."""
        try:
            args = ocp.args.Composite(record=ocp.args.JsonRestore())
            return self._reader.restore(path, args=args).record, ""
        except Exception as error:  # as in _read
            return None, _reason(error)

    def _read(self, path: epath.Path, abstract: Any, partial: bool) -> tuple[Any, str, str]:
        """(arrays and info, how the arrays differ from `abstract`, why it cannot be read)."""
        flat = _flatten(abstract)
        try:
            record = self._reader.restore(
                path, args=ocp.args.Composite(record=ocp.args.JsonRestore())
            ).record
            saved = record["arrays"]
            if partial:
                saved = {name: saved[name] for name in saved if name in flat}
            mismatch = _differences(saved, _table(flat))
            if mismatch:
                return None, mismatch, ""
            restored = self._reader.restore(
                path, args=ocp.args.Composite(arrays=_restore_args(flat, partial))
            ).arrays
            leaves = jax.block_until_ready([restored[name] for name in flat])
        # Broad on purpose: each layer below (Orbax, TensorStore, json, the file system) has its own
        # exceptions for damaged data. The reason is reported, and fatal where nothing else is left.
        except Exception as error:
            return None, "", _reason(error)
        arrays = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        return (arrays, record["info"]), "", ""

    def _report(self, unreadable: Mapping[int, str], fallback: int) -> None:
        self._unreadable = set(unreadable)
        if self._is_first:
            for step, reason in unreadable.items():
                log.warning(
                    "checkpoint %d in %s cannot be read (%s); continuing from checkpoint %d",
                    *(step, self._folder, reason, fallback),
                )

    def _tidy_up(self) -> None:
        """Before the first save: removes half-written checkpoints, sets unreadable ones aside."""
        if self._is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.iterdir():
                if ".orbax-checkpoint-tmp" in path.name:
                    path.rmtree()
            for step in self._unreadable:
                target = self._folder / f"{step}.unreadable"
                if target.exists():
                    target.rmtree()
                (self._folder / str(step)).rename(target)
        self._unreadable = set()
        processes.all_gather_text("tidy")  # nobody saves a step whose name is still taken


def quiet_orbax() -> None:
    """Drops Orbax's DEBUG and INFO messages, which it logs through absl; warnings stay."""
    logger = logging.getLogger("absl")
    if not any(isinstance(item, _OrbaxFilter) for item in logger.filters):
        logger.addFilter(_OrbaxFilter())


class _OrbaxFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or "orbax" not in record.pathname


def _handler(options: ocp.options.MultiprocessingOptions) -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        arrays=ocp.PyTreeCheckpointHandler(
            multiprocessing_options=options,
            # Replicas that divide a save among themselves compile a slice per shape, in mid-run.
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


def _restore_args(
    flat: Mapping[str, jax.ShapeDtypeStruct], partial: bool
) -> ocp.args.PyTreeRestore:
    restore_args = ocp.checkpoint_utils.construct_restore_args(dict(flat))
    return ocp.args.PyTreeRestore(
        item=dict(flat), restore_args=restore_args, partial_restore=partial
    )


def _write_sizes(checkpoint: epath.Path) -> None:
    """Lists the files of a checkpoint that is complete but may still have its temporary name."""
    folder = checkpoint
    if not folder.exists():
        (folder,) = checkpoint.parent.glob(f"{checkpoint.name}.orbax-checkpoint-tmp*")
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().length
        for item in ITEMS
        for path in _files(folder / item)
    }
    (folder / SIZES_FILE).write_text(json.dumps(sizes, indent=0))


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _damage(checkpoint: epath.Path) -> str:
    """The first file that is missing or has lost a part, "" if all are whole."""
    try:
        sizes = json.loads((checkpoint / SIZES_FILE).read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        return f"{SIZES_FILE}: {type(error).__name__}"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().length != size:
            return f"{name} has {path.stat().length} bytes of {size}"
    return ""


def _flatten(tree: Any) -> dict[str, Any]:
    """{"opt.0.mu.embed": leaf}: names survive changes of container types, which Orbax would not."""
    leaves = jax.tree.leaves_with_path(tree)
    flat = {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of the tree share a name"
    return flat


def _table(flat: Mapping[str, Any]) -> ArrayTable:
    return {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in flat.items()}


def _differences(saved: ArrayTable, wanted: ArrayTable) -> str:
    """One line of what differs, "" if nothing does."""
    both = saved.keys() & wanted.keys()
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
