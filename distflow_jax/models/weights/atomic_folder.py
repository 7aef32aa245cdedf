"""Atomic creation of a folder: it gets its name only when it is complete."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from distflow_jax.parsing.paths import checked_path, named_path

_RESERVE = 16 << 20  # bytes left free for the file system's own data


def check_new_folder(out: Path, *, overwrite: bool, needed: int, mark: str = "config.json") -> None:
    """Raises ValueError if `new_folder` could not write `needed` bytes as `out`.

    With `overwrite`, an existing folder must contain the file `mark` and no folders, so that a typo
    in the name does not delete a home directory.
    """
    out = _absolute(checked_path("new_folder", "model folder", out))
    if os.path.ismount(out):
        raise ValueError(f"{out} is a mount point; choose a folder inside it")
    entries = sorted(out.iterdir()) if out.is_dir() else []
    if entries and not overwrite:
        raise ValueError(
            f"{out} is not empty (it holds {entries[0].name}); choose another folder, or replace "
            "it with --overwrite"
        )
    folders = [entry.name for entry in entries if entry.is_dir()]
    if entries and (folders or not (out / mark).is_file()):
        reason = f"it holds the folder {folders[0]}" if folders else f"it has no {mark}"
        raise ValueError(f"{out} is not a model folder ({reason}) and is not overwritten")
    parent = next(folder for folder in out.parents if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if needed + _RESERVE > free:
        raise ValueError(
            f"{out} needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free at {parent}; free "
            "some space, choose a folder on another disk, or use a narrower dtype"
        )


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields an empty folder beside `out`, which is renamed to `out` at the end of the block.

    An existing folder is deleted after that. An error in the block leaves nothing behind. A killed
    process leaves `.NAME.partial-...`, but never an incomplete `out`; between the two renames of an
    overwrite it leaves no `out`, and what was there as `.NAME.old-...`.
    """
    out = _absolute(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{os.getpid()}-{secrets.token_hex(4)}"
    partial, old = (out.with_name(f".{out.name}.{kind}-{mark}") for kind in ("partial", "old"))
    partial.mkdir()
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(_undo, partial, old, out)
        yield partial
        for path in (*partial.iterdir(), partial):
            _sync(path)
        if out.is_dir() and any(out.iterdir()):
            os.rename(out, old)
        os.rename(partial, out)
        on_failure.pop_all()
    _sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _undo(partial: Path, old: Path, out: Path) -> None:
    """Removes what was written, and restores the folder that was there."""
    shutil.rmtree(partial, ignore_errors=True)
    if old.exists() and not out.exists():
        os.rename(old, out)


def _absolute(path: Path) -> Path:
    # resolves links: the folder itself is renamed, not a link to it
    return Path(os.path.realpath(named_path("model folder", path)))


def _sync(path: Path) -> None:
    """Flushes a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
