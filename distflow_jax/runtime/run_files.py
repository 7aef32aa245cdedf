"""Files of a run: the check of its folder before step 1, and the records of samples/."""

import contextlib
import itertools
import json
import logging
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from distflow_jax.batch import Prompt, Samples
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.checkpoint.run_lock import only_run
from distflow_jax.cluster import processes
from distflow_jax.config.config_dict import REMOVED, RENAMED, to_config_dict, to_json
from distflow_jax.config.run_config import Config
from distflow_jax.images.data_uris import first_of_prompts, pictures
from distflow_jax.layout import RESPONSE_IMAGES, ROUTED_EXPERTS, ROWS_COLUMNS, STEP, VERSION
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.parsing.json_text import read_json_object
from distflow_jax.parsing.paths import named_path
from distflow_jax.programs.launch_log import launch_log
from distflow_jax.programs.program_cache import kept_programs
from distflow_jax.report.json_lines import explained_disk_errors, json_line
from distflow_jax.report.run_writer import check_steps
from distflow_jax.report.terminal import Terminal
from distflow_jax.report.trackers.tracker import check_trackers
from distflow_jax.stages.evaluate import Scored
from distflow_jax.watchdog.supervision import StopSignal

# that a run makes
FOLDERS = "checkpoints groups launches profile recorded samples tensorboard trackers".split()
FILES = (
    "implementations.json config.json events.jsonl memory.json metrics.jsonl partial_batches.jsonl "
    "plan.json plan.svg plan.txt report.html run.lock stragglers.jsonl trace.json"
).split()

log = logging.getLogger("distflow_jax")


def run_folder(workdir: str | os.PathLike) -> pathlib.Path:
    """The folder of a run, see `named_path`."""
    return named_path("--workdir", workdir, written=True)


@contextlib.contextmanager
def open_folder(
    config: Config, workdir: str | os.PathLike, stop: StopSignal
) -> Iterator[tuple[pathlib.Path, Terminal, Checkpointer]]:
    """A block in which a run alone has its folder: (folder, terminal, checkpoints). Collective.

    A last checkpoint, which is saved beside the steps, is waited for at the end.
    """
    folder = run_folder(workdir)
    if processes.process_index() == 0:  # the others have no use for their packages
        check_trackers(config.observe.trackers)
    terminal = Terminal(enabled=processes.process_index() == 0)
    with explained_disk_errors(folder), contextlib.ExitStack() as files:
        files.enter_context(private_files(config.observe.private))
        if not folder.exists():
            files.callback(_remove_empty, folder)  # of a run that was refused
        check_writable(folder)
        check_readable(folder)
        files.callback(terminal.close)
        files.callback(release := only_run(folder))
        stop.before_leaving += [terminal.console.show_cursor, release]
        saved = Checkpointer(folder / "checkpoints", config.checkpoint)
        files.callback(_close, saved, terminal)
        files.enter_context(kept_programs(config.compilation_cache))
        launches = folder / "launches" / f"{processes.process_index()}.txt"
        files.enter_context(launch_log(launches if config.observe.launches else None))
        yield folder, terminal, saved


def _remove_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _close(saved: Checkpointer, terminal: Terminal) -> None:
    with terminal.activity("close"):
        saved.close()


@contextlib.contextmanager
def private_files(enabled: bool) -> Iterator[None]:
    """A block in which this process, and those it starts, make files for their owner alone."""
    before = os.umask(0o077)
    if not enabled:
        os.umask(before)
    try:
        yield
    finally:
        os.umask(before)


def check_writable(folder: pathlib.Path) -> None:
    """Raises ValueError if this process cannot write the files of a run below `folder`."""
    for name in (*FOLDERS, *FILES):
        path, kind = folder / name, "folder" if name in FOLDERS else "file"
        if os.path.lexists(path) and not (path.is_dir() if kind == "folder" else path.is_file()):
            raise ValueError(
                f"--workdir {str(folder)!r}: {name} is no {kind}, and a run makes a {kind} of that "
                f"name; move {path} away, or choose another folder"
            )
    probe = folder / f".write_check_{processes.process_index()}"
    try:
        with contextlib.suppress(FileExistsError):  # a file of that name is told by the probe
            folder.mkdir(parents=True)
        probe.write_text("ok")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"cannot write to --workdir {str(folder)!r} ({error.strerror}); choose a folder that "
            "every process can write to"
        ) from error


def check_readable(folder: pathlib.Path) -> None:
    """Raises ValueError for a damaged file of an earlier start, which a run reads once built."""
    if (path := folder / "config.json").exists():
        read_json_object(path)
    for name in ("metrics.jsonl", "stragglers.jsonl"):
        check_steps(folder / name)


def recorded_date(folder: pathlib.Path) -> str:
    """data.date of the run in a folder; "" if it has none."""
    try:
        return str(json.loads((folder / "config.json").read_text())["data"]["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def warn_of_changes(path: pathlib.Path, now: dict[str, Any]) -> None:
    """Says which settings differ from those of the run that is continued.

    An older version did not know the keys that its file lacks: it ran as by their defaults.
    """
    if changed := _changes(path, now):
        log.warning(
            "the config differs from the one this run was started with: %s",
            ", ".join(changed.values()),
        )


@contextlib.contextmanager
def changes_named(folder: pathlib.Path, config: Config) -> Iterator[None]:
    """A block that reads a checkpoint: its errors name the settings that changed since the last
    start of the run in `folder`, if these could be why."""
    try:
        yield
    except ValueError as error:
        try:
            changed = _changes(folder / "config.json", json.loads(to_json(to_config_dict(config))))
        except (OSError, ValueError):  # it may be damaged too
            raise error from None
        found = [text for key, text in changed.items() if key.split(".")[0] not in _HARMLESS]
        if not found:
            raise
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise ValueError(
            f"{error}. Since the last start these settings changed: "
            f"{', '.join(found[:_MOST_NAMED])}{more}"
        ) from error


# sections of the config on which neither weights nor data depend
_HARMLESS = ("checkpoint", "compilation_cache", "eval", "health", "observe")
_MOST_NAMED = 8  # settings in an error


def _changes(path: pathlib.Path, now: dict[str, Any]) -> dict[str, str]:
    """{key: how its value changed since config.json was written}; {} without that file."""
    if not path.exists():
        return {}
    defaults, now = (flatten_dict(d, sep=".") for d in (_defaults(), now))
    saved = flatten_dict(dict(read_json_object(path)), sep=".")
    saved = {RENAMED.get(key, key): value for key, value in saved.items() if key not in REMOVED}
    before = {key: defaults[key] for key in defaults.keys() & now.keys()} | saved
    return {
        key: f"{key} {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def _defaults() -> dict[str, Any]:
    return json.loads(to_json(to_config_dict(Config())))


def sample_lines(samples: Samples, tokenizer: Tokenizer) -> list[str]:
    """The lines of samples/STEP.jsonl of this process's `samples` and those of all others, a
    response each: in process 0, [] elsewhere. Collective."""
    scalars = {
        name: values
        for name, values in samples.fields.items()
        if name not in (*ROWS_COLUMNS, "rollout_logp", ROUTED_EXPERTS, RESPONSE_IMAGES, STEP)
    }
    if VERSION in scalars:
        masks = samples.response_mask
        scalars[VERSION] = [_version(x, m) for x, m in zip(scalars[VERSION], masks, strict=True)]
    uids = samples.uid.tolist()
    records = [
        {
            "uid": uids[i],
            "row": prompt.row,
            "data_source": prompt.data_source,
            "prompt": prompt.text,
            "response": tokenizer.decode(samples.response[i], skip_special=False),
            "ground_truth": prompt.ground_truth,
            "response_length": len(samples.response[i]),
            **{name: values[i] for name, values in scalars.items()},
        }
        for i, prompt in enumerate(samples.prompt)
    ]
    return _gathered(uids, samples.prompt, records)


def evaluation_lines(scored: Sequence[Scored]) -> list[str]:
    """The lines of samples/eval-STEP.jsonl, a prompt each, as `sample_lines`. Collective."""
    records = [
        {
            "row": s.prompt.row,
            "data_source": s.prompt.data_source,
            "prompt": s.prompt.text,
            "ground_truth": s.prompt.ground_truth,
            "responses": s.texts,
            "scores": s.scores,
            "lengths": s.lengths,
            "finished": s.finished,
        }
        for s in scored
    ]
    prompts = [s.prompt for s in scored]
    return _gathered([[prompt.counter, 0] for prompt in prompts], prompts, records)


def _gathered(
    uids: Sequence[list[int]], prompts: Sequence[Prompt], records: Sequence[dict[str, Any]]
) -> list[str]:
    """The records of all processes in the order of their uids, the first ones with pictures."""
    seen = [uid for uid, prompt in zip(uids, prompts, strict=True) if prompt.images]
    shown = first_of_prompts(itertools.chain(*processes.all_gather_json(first_of_prompts(seen))))
    for uid, prompt, record in zip(uids, prompts, records, strict=True):
        if uid in shown:
            record["images"] = pictures(prompt.images)
    found: list[tuple[list[int], str]] = []
    for text in processes.gather_text("\n".join([json.dumps(uids), *map(json_line, records)])):
        theirs, *lines = text.split("\n")
        found += zip(json.loads(theirs), lines, strict=True)
    return [line for _, line in sorted(found, key=lambda entry: entry[0])]


def _version(version: Any, mask: np.ndarray) -> int | list[int]:
    """The version that sampled a response, or that of each token [T] where there are several.

    Observations, where `mask` [T] is false, were not sampled.
    """
    if not np.ndim(version):  # of a user's own sampler
        return int(version)
    found = np.unique(version[mask])
    return version.tolist() if len(found) > 1 else int(found.max(initial=0))
