"""Rows that this process checks for all processes of a job, and what earlier starts have found.

A data set of a million rows is parsed, rendered and counted once: each process takes a contiguous
share, all processes then get what each has found, and the next start reads it from a file.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_MOST_FILES = 64  # that are kept of earlier starts, of data sets or of their settings

Arrays = Mapping[str, np.ndarray]


def _one(value: Any) -> list[Any]:
    return [value]


@dataclasses.dataclass(frozen=True)
class RowShare:
    """This process's share of the rows. With several processes, every use of it is collective.

    `gather` takes a value of JSON and `gather_arrays` an array [n, ...], and both return those of
    all processes in order. `kept`: the folder of earlier results, None for none. `code`: what
    results depend on beside their key, such as a hash of this package.
    """

    index: int = 0
    count: int = 1
    gather: Callable[[Any], list[Any]] = _one
    gather_arrays: Callable[[np.ndarray], list[np.ndarray]] = _one
    kept: Path | None = None
    code: str = ""

    @property
    def keeps(self) -> bool:
        """Whether results are kept, by every process."""
        return all(self.gather(self.kept is not None))

    def of(self, total: int) -> tuple[int, int]:
        """(first row, end) of this process's share of `total` rows."""
        return self.index * total // self.count, (self.index + 1) * total // self.count

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """A block in which this process checks its rows: the error of the first bad row of all
        processes is raised in each of them; in the others as ValueError."""
        found: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            found = error
        texts = self.gather(None if found is None else str(found))
        first = next((i for i, text in enumerate(texts) if text is not None), None)
        if first == self.index and found is not None:
            raise found
        if first is not None:
            raise ValueError(texts[first])

    def whole(self, part: np.ndarray) -> np.ndarray:
        """The parts [n, ...] of all processes, joined in the order of the rows: [N, ...]."""
        return np.concatenate(self.gather_arrays(part))

    def known(self, key: Any) -> Arrays | None:
        """Results of an earlier start under `key`, if every process has them."""
        found = self._read(key)
        return found if all(self.gather(found is not None)) else None

    def keep(self, key: Any, **arrays: np.ndarray) -> None:
        """Keeps what this start has found. A disk without room costs the next start its time."""
        if self.kept is None or self.index:
            return
        path, content = self._path(key), io.BytesIO()
        np.savez_compressed(content, **arrays)
        with contextlib.suppress(OSError):
            self.kept.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}.tmp")
            scratch.write_bytes(content.getvalue())
            os.replace(scratch, path)
            dated = sorted((found.stat().st_mtime, found) for found in self.kept.glob("*.npz"))
            for _, old in dated[:-_MOST_FILES]:
                old.unlink(missing_ok=True)

    def _read(self, key: Any) -> Arrays | None:
        if self.kept is None:
            return None
        path = self._path(key)
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
            os.utime(path)  # the oldest are removed first
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            return None
        return found

    def _path(self, key: Any) -> Path:
        text = json.dumps([self.code, key], sort_keys=True)
        return self.kept / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.npz"
