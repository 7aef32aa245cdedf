"""A folder that appears under its name when all of it is there, whatever happens on the way."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_RESERVE = 16 << 20  # bytes left free, for what the file system itself writes


def check_new_folder(out: Path, *, overwrite: bool, needed: int, mark: str = "config.json") -> None:
    """Raises ValueError where `new_folder` could not write `needed` bytes as `out`.

    With `overwrite` the folder that is there must look like what is to replace it: the file `mark`,
    and files only. So nobody's home goes for a slip in the name.
    """
    out = _absolute(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder that does not exist yet")
    if os.path.ismount(out):
        raise ValueError(f"{out} is where a disk is mounted; name a folder inside it")
    entries = sorted(out.iterdir()) if out.is_dir() else []
    if entries and not overwrite:
        raise ValueError(
            f"{out} is not empty (it holds {entries[0].name}); name another folder, or replace it "
            "with --overwrite"
        )
    folders = [entry.name for entry in entries if entry.is_dir()]
    if entries and (folders or not (out / mark).is_file()):
        reason = f"it holds the folder {folders[0]}" if folders else f"it has no {mark}"
        raise ValueError(f"{out} is no model's folder ({reason}) and is not overwritten")
    there = next(folder for folder in out.parents if folder.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{there} cannot be written to; name another folder")
    free = shutil.disk_usage(there).free
    if needed + _RESERVE > free:
        raise ValueError(
            f"{out} needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free at {there}; free "
            "some, name a folder on another disk, or take a narrower dtype"
        )


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields an empty folder beside `out` to write files into, which takes its name at the end.

    What was there before stays until then, and goes. An error in the block leaves nothing behind;
    a kill leaves `.NAME.partial-...`, and never a part under the name itself.
    """
    out = _absolute(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{os.getpid()}-{secrets.token_hex(4)}"
    partial, old = (out.with_name(f".{out.name}.{kind}-{mark}") for kind in ("partial", "old"))
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            _sync(path)
        if out.is_dir() and any(out.iterdir()):
            os.rename(out, old)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not out.exists():
            os.rename(old, out)
        raise
    _sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _absolute(path: Path) -> Path:
    # through links: the folder itself is renamed, not what points to it
    return Path(os.path.realpath(path.expanduser()))


def _sync(path: Path) -> None:
    """Waits until a file's content, or a folder's names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
