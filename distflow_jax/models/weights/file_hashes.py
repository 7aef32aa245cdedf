"""Hashes of a model folder's files: written beside them, and verified when the model is read.

    FOLDER/SHA256SUMS   "HEX  NAME" for each file, as `sha256sum` writes and `sha256sum -c` reads it

Exports and unpacked wheels have that file. In the cache of the Hugging Face hub a file is a link to
one that is named by its digest: SHA-256 for weights, git's SHA-1 for small files.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from distflow_jax.parsing.json_text import read_text
from distflow_jax.parsing.one_line import shown
from distflow_jax.parsing.paths import names_file

FILE = "SHA256SUMS"
_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](\./)?(?P<name>.+)")
_MOST_BYTES = 1 << 20  # of SHA256SUMS
_SMALL = 64 << 20  # bytes; larger files are verified when weights are read
_THREADS = 4  # hashlib and reads release the interpreter's lock
Reader = Callable[[np.dtype], Iterator[tuple[str, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class Stated:
    """The digest that a file ought to have, by whom, and what helps if it has another."""

    kind: str  # sha256, or "git": that of git's objects
    digest: str
    by: str
    fix: str


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_hashes(folder: Path) -> None:
    """Writes SHA256SUMS of all files in a folder; the last file to write."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != FILE)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(sha256_of, paths)
        lines = [f"{digest}  {path.name}\n" for digest, path in zip(digests, paths, strict=True)]
    (folder / FILE).write_text("".join(lines), "utf-8", newline="\n")


def stated_hashes(folder: Path) -> dict[str, Stated]:
    """{file name: the digest that it ought to have} of a folder; empty where nothing states any.

    Raises ValueError if SHA256SUMS cannot be read.
    """
    sums = folder / FILE
    if not names_file(sums):
        return {p.name: found for p in sorted(folder.iterdir()) if (found := _of_the_hub(p))}
    fix = f"restore it, or, where the change was meant, write its line in {FILE} again"
    stated = {}
    for number, line in enumerate(read_text(sums, _MOST_BYTES).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not (match := _LINE.fullmatch(line)):
            raise ValueError(
                f"{sums}, line {number}: expected 64 hex digits, two spaces and a name, as "
                f"sha256sum writes them, got {shown(line)}"
            )
        name = match["name"]
        # models lie in one folder; `sha256sum *` lists its own unfinished output
        if "/" not in name and name != FILE:
            stated[name] = Stated("sha256", match["digest"].lower(), FILE, fix)
    return stated


def verify(paths: Iterable[Path], stated: dict[str, Stated]) -> None:
    """Raises ValueError that names the first of these files that is not as stated."""
    known = [path for path in paths if path.name in stated]
    with ThreadPoolExecutor(_THREADS) as pool:
        _raise_first(pool.map(lambda path: _difference(path, stated[path.name]), known))


def verify_small(folder: Path, names: Iterable[str], stated: dict[str, Stated]) -> None:
    """As `verify`, of those that are not large; of the others only whether they are there."""
    paths = [folder / name for name in names]
    verify((p for p in paths if not names_file(p) or p.stat().st_size <= _SMALL), stated)


def verified_reader(reader: Reader, paths: Iterable[Path]) -> Reader:
    """A reader of the weights in `paths`, whose first stream ends with their verification.

    Files are hashed beside the stream. Nothing is added where nothing states their digests.
    """
    files = list(paths)
    stated = stated_hashes(files[0].parent)
    wanted = [(path, stated[path.name]) for path in files if path.name in stated]
    if not wanted:
        return reader
    verified: list[bool] = []

    def read(dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
        if verified:
            yield from reader(dtype)
            return
        pool = ThreadPoolExecutor(_THREADS, "hashes")
        try:
            differences = pool.map(lambda item: _difference(*item), wanted)
            yield from reader(dtype)
            _raise_first(differences)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        verified.append(True)

    return read


def _of_the_hub(path: Path) -> Stated | None:
    if not path.is_symlink():
        return None
    blob = path.readlink()
    if blob.parent.name != "blobs" or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        return None
    kind = "sha256" if len(blob.name) == 64 else "git"
    fix = f"remove {path.resolve()} to fetch it again"
    return Stated(kind, blob.name, "the Hugging Face hub", fix)


def _difference(path: Path, stated: Stated) -> str:
    """The difference of a file from what is stated, in words; "" if there is none."""
    if not names_file(path):
        return f"{path} is missing, which {stated.by} lists: {stated.fix}"
    found = sha256_of(path) if stated.kind == "sha256" else _git_digest(path)
    if found == stated.digest:
        return ""
    name = "SHA-256" if stated.kind == "sha256" else "git's SHA-1"
    return (
        f"{path} is not the file that {stated.by} states: wanted {name} {stated.digest}, found "
        f"{found}; {stated.fix}"
    )


def _git_digest(path: Path) -> str:
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest()


def _raise_first(differences: Iterable[Any]) -> None:
    if found := next(filter(None, differences), ""):
        raise ValueError(found)
