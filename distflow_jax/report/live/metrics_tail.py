"""Follows a metrics.jsonl by offsets, so that a reader gets each line once.

A reader keeps a token: the offset up to which it has read, and a digest of the bytes before it. A
run that resumes may drop lines at the end of its file, or write other ones. The token then no
longer fits, and the reader begins anew.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from distflow_jax.report.json_lines import json_number
from distflow_jax.report.read_run import inside, metrics_of

_CHECKED = 512  # bytes before the offset that the digest covers
_MOST_BYTES = 4 << 20  # of one answer; the reader calls again for the rest


@dataclasses.dataclass(frozen=True)
class News:
    """Rows that were appended, {"step": ..., metric: value}, and the reader's next token.

    Values that are not finite are the words of the file. `token` "": the file is not the one that
    was read before; the reader begins anew.
    """

    rows: list[dict[str, Any]]
    token: str


def end_token(path: pathlib.Path) -> str:
    """The token of a reader that has read all complete lines of a file."""
    if not inside(path, path.parent):
        return _token(0, b"")
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = max(0, size - _MOST_BYTES)
        file.seek(start)
        tail = file.read()  # the run may have written more since
        end = start + tail.rfind(b"\n") + 1
        return _token_at(file, end)


def news(path: pathlib.Path, token: str) -> News:
    """The complete lines after a reader's token."""
    offset = _offset(token)
    if not inside(path, path.parent):
        return News([], token if offset == 0 else "")
    with path.open("rb") as file:
        if offset is None or _token_at(file, offset) != token:
            return News([], "")
        file.seek(offset)
        data = file.read(_MOST_BYTES)
        end = data.rfind(b"\n") + 1
        rows = [row for line in data[:end].split(b"\n") if (row := _row(line))]
        return News(rows, _token_at(file, offset + end) if end else token)


def _row(line: bytes) -> dict[str, Any] | None:
    """A line's step and numbers; None for a line without a step."""
    try:
        found = json.loads(line) if line.strip() else None
        found = metrics_of(found) if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None
    if found is None:
        return None
    step, values = found
    return {"step": step} | {name: json_number(value) for name, value in values.items()}


def _offset(token: str) -> int | None:
    number = token.partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 16 else None


def _token_at(file: Any, offset: int) -> str:
    """The token of an offset; of a file that is shorter, one that fits no offset in it."""
    start = max(0, offset - _CHECKED)
    file.seek(start)
    return _token(offset, file.read(offset - start))


def _token(offset: int, before: bytes) -> str:
    return f"{offset}-{hashlib.sha256(before).hexdigest()[:16]}"
