"""Files and folders that strangers named: whatever is wrong with one is said in one line.

`name` is the flag, the key or the variable that gave a path: messages begin with it. Errors are
FileNotFoundError where there is nothing, and else ValueError.
"""

import contextlib
import dataclasses
import errno
import importlib.util
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from distflow_jax.parsing.one_line import not_utf8, one_line, shown

KINDS = ("file", "folder", "new_file", "new_folder")  # of paths, see `checked_path`


@dataclasses.dataclass(frozen=True)
class _BucketStore:
    """An object store: how to come by files of a bucket, and to keep files there."""

    mount: str
    copy: str  # with the place that is read and the place that is written
    packages: tuple[str, ...]  # of which one lets JAX keep compiled programs in a bucket


_STORES = {
    "gs": _BucketStore("gcsfuse", "gcloud storage cp --recursive {} {}", ("gcsfs", "tensorflow")),
    "s3": _BucketStore("mount-s3", "aws s3 cp --recursive {} {}", ("s3fs",)),
}


def refuse_bucket(name: str, text: str, *, written: bool = False) -> None:
    """ValueError, with what to do instead, for a path in a bucket: gs:// or s3://.

    `written`: whether files are made there; those of a run grow and are renamed, which object
    stores do not support.
    """
    if not (store := _store_of(text)):
        return
    fix = f"mount it ({store.mount}), or copy it first: {store.copy.format(shown(text), 'FOLDER')}"
    if written:
        fix = (
            "write to a disk or a shared file system (NFS, Filestore), and copy the files "
            f"afterwards: {store.copy.format('FOLDER', shown(text))}"
        )
    raise ValueError(_said(name, text, f"is in a bucket, which is no file system; {fix}"))


def check_program_bucket(name: str, text: str) -> None:
    """ValueError unless JAX can keep compiled programs at a URL: in a bucket, by a package."""
    if not (store := _store_of(text)):
        raise ValueError(_said(name, text, "is in no file system, and in no bucket of gs or s3"))
    if not any(map(importlib.util.find_spec, store.packages)):
        package = store.packages[0]
        fix = f"pip install {package}, or name a folder on a shared file system"
        raise ValueError(_said(name, text, f"is in a bucket, for which JAX needs {package}: {fix}"))


def _store_of(text: str) -> _BucketStore | None:
    scheme, found, _ = text.strip().partition("://")
    return _STORES.get(scheme.lower()) if found else None


def cache_folder() -> Path:
    """The user's folder of what can be made again: $DISTFLOW_CACHE, or ~/.cache/distflow_jax."""
    return named_path("DISTFLOW_CACHE", os.environ.get("DISTFLOW_CACHE") or "~/.cache/distflow_jax")


def named_path(
    name: str,
    text: str | os.PathLike,
    folder: str | os.PathLike = "",
    *,
    written: bool = False,
) -> Path:
    """The path of a name, with ~ at its start and $VARIABLES replaced as shells do.

    A relative one begins in `folder`, "" is the working folder; `written` as of `refuse_bucket`.
    Raises ValueError for a name that cannot be looked up: empty, in a bucket, another URL, too
    long, a circle of links, a variable that is not set.
    """
    given = os.fspath(text)
    if not given.strip():
        raise ValueError(f"{name} is empty: name a file or a folder")
    refuse_bucket(name, given, written=written)
    if "://" in given:
        raise ValueError(_said(name, given, "is in no file system: mount it, or name a path"))
    if found := not_utf8(given):
        raise ValueError(f"{name}={shown(given)} is not UTF-8 ({found}); choose another name")
    found = os.path.join(folder, os.path.expanduser(os.path.expandvars(given)))
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # readers say so
            os.stat(found)
    except (OSError, ValueError) as error:
        raise ValueError(_said(name, given, "cannot be looked up", error)) from error
    left = re.search(r"\$[\w{]", found) or given[0] == found[0] == "~"
    if left and not os.path.lexists(found):
        raise ValueError(_said(name, given, "has a ~ or $ that stands for nothing: write it out"))
    return Path(found)


def checked_path(kind: str, name: str, text: str | os.PathLike) -> Path:
    """The path of a file or folder that can be read, or (new_) written; it need not exist then."""
    path = named_path(name, text, written=kind.startswith("new_"))
    if kind == "file":
        with reading(path, name) as file:
            file.read(1)
    elif kind == "folder":
        with _errors_of(path, name):
            os.scandir(path).close()
    else:
        place = path if kind == "new_folder" else path.parent
        while not os.path.lexists(place):
            place = place.parent
        if kind == "new_file" and os.path.lexists(path) and not path.is_file():
            raise ValueError(_said(name, text, "is no file, and would be replaced by one"))
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise ValueError(_said(name, text, f"cannot be written: {place} is no folder for that"))
    return path


def names_file(path: str | os.PathLike) -> bool:
    """Whether there is a file of that name; none has a name that the system cannot look up."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long; a null character
        return False


@contextlib.contextmanager
def reading(path: str | os.PathLike, name: str = "", most: int | None = None) -> Iterator[BinaryIO]:
    """A block that reads a file of at most `most` bytes, and no device or pipe, which may have no
    end, or no beginning."""
    with (
        _errors_of(path, name),
        # a pipe would wait for its writer
        open(path, "rb", opener=lambda path, mode: os.open(path, mode | os.O_NONBLOCK)) as file,
    ):
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "It is a device, a pipe or a socket")
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"It has more than {most} bytes, too many for such a file")
        yield file


@contextlib.contextmanager
def _errors_of(path: str | os.PathLike, name: str) -> Iterator[None]:
    """A block whose errors of the system are those of one path."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(_said(name, path, "does not exist")) from error
    except OSError as error:
        raise ValueError(_said(name, path, "cannot be read", error)) from error


def _said(name: str, path: str | os.PathLike, problem: str, error: Exception | None = None) -> str:
    joint = "" if not name else " " if " " in name else "="
    reason = f": {getattr(error, 'strerror', None) or error}" if error else ""
    return f"{name}{joint}{one_line(os.fspath(path))} {problem}{reason}"
