"""Numbers and records as lines of JSON, and files that keep what they had when a write fails.

JSON has no NaN and no infinity: these are strings.
"""

import contextlib
import errno
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

NON_FINITE = ("NaN", "Infinity", "-Infinity")
PAUSES = (0.5, 1.0, 2.0)  # seconds before an operation is repeated
_PASSING = {errno.EIO, errno.ESTALE, errno.EAGAIN}  # of network file systems, for a while
# full, over a quota or a limit of sizes, read-only, failing
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENODEV, *_PASSING}

log = logging.getLogger("distflow_jax")


def json_number(value: int | float) -> int | float | str:
    """A number as JSON holds it: the strings of NON_FINITE where it is not finite."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_value(value: Any) -> Any:
    """Records as JSON values: NumPy arrays are lists, numbers and NaN are as in metrics."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return json_value(value.tolist())
    if isinstance(value, float):
        return json_number(value)
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)


def json_line(record: Any) -> str:
    """A record as a line of JSON, without its end; see `json_value`."""
    text = json.dumps(json_value(record), ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()  # halves of characters as JSON has them


def metrics_row(line: str) -> dict[str, int | float]:
    """A line of metrics.jsonl as {"step": step, name: number}; NaN and infinities are floats."""
    row = json.loads(line)
    return {k: float(v) if v in NON_FINITE else v for k, v in row.items()}


def complete_lines(text: str) -> list[str]:
    """The lines of a text without the last one, if a newline does not end it."""
    *lines, torn = text.split("\n")
    return lines


def write_atomic(path: str | os.PathLike, text: str) -> None:
    """Writes a text file atomically: after a crash it has the old content or the new.

    Raises OSError; the old content is then still there.
    """
    path = pathlib.Path(path)
    scratch = path.with_name(f".{path.name}.tmp")

    def write() -> None:
        try:
            with scratch.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # without it a power failure could leave an empty file
            os.replace(scratch, path)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise

    _repeated(write)


def append(path: str | os.PathLike, text: str) -> None:
    """Appends a text to a file that has no other writer, all of it or nothing.

    A SIGKILL afterwards loses nothing. Raises OSError; what was there before is then still there.
    """
    data = text.encode()

    def write() -> None:
        with open(path, "ab", buffering=0) as file:
            begin, rest = file.seek(0, os.SEEK_END), data
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(begin)
                raise

    _repeated(write)


@contextlib.contextmanager
def explained_disk_errors(folder: pathlib.Path) -> Iterator[None]:
    """A block in which an error of a disk becomes a ValueError that names the file and the fix."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise ValueError(
            f"{error.filename or folder} cannot be written ({os.strerror(error.errno)}). Make room "
            f"on that disk or mend it, then start again: the run in {folder} goes on from its last "
            "checkpoint"
        ) from error


def _repeated(operation: Callable[[], None]) -> None:
    """Repeats an operation that fails with an error that network file systems recover from."""
    for pause in (*PAUSES, None):
        try:
            return operation()
        except OSError as error:
            if error.errno not in _PASSING or pause is None:
                raise
            log.warning("%s: %s; trying again", error.filename, error.strerror)
            time.sleep(pause)
