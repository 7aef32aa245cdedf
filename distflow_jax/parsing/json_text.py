"""JSON of strangers: every fault of text is one ValueError that names the place.

Python's own parser raises three kinds of errors, two of them for valid JSON, and accepts what no
other parser does. A key that occurs twice in an object is a fault too: one value would be lost.
Bounds: nesting as deep as Python's stack, integers of 4,300 digits (sys.set_int_max_str_digits),
and a size of files.
"""

import collections
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distflow_jax.parsing.one_line import one_line, shown
from distflow_jax.parsing.paths import reading

MOST_FILE_BYTES = 256 << 20  # of a JSON file read whole: vocabularies have some 30 MiB


class _RepeatedKeyError(ValueError):
    """An object has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _)] = collections.Counter(key for key, _ in pairs).most_common(1)
        raise _RepeatedKeyError(f"key {shown(key)} occurs twice in an object: keep one")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def parse_json(text: str | bytes | bytearray, place: str) -> Any:
    """The value of a JSON text; bytes are UTF-8, with or without a mark of byte order.

    `place` begins messages: file and row. Raises ValueError with it.
    """
    try:
        # loads(bytes) would guess the encoding
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {json_problem(error)}") from error


def json_problem(error: Exception, *, of_file: bool = False) -> str:
    """The reason, in one line, for an error that Python's JSON parser raised.

    `of_file`: the text is a file, whose lines are counted even where it is the first.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text: byte {error.start + 1} is {error.object[error.start]:#04x}"
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if of_file or error.lineno > 1 else ""
        return f"not valid JSON at {line}character {error.colno}: {one_line(error.msg)}"
    if isinstance(error, RecursionError):
        return "objects nested too deeply: flatten them"
    if isinstance(error, _RepeatedKeyError):
        return str(error)
    return f"a number with too many digits ({str(error).split(';')[0]}): write it as a string"


def read_json_object(path: Path, name: str = "") -> Mapping[str, Any]:
    """The object in a JSON file.

    Raises ValueError, with the path, for a file that is too large, is no JSON, or is another value.
    `name`: of the flag or key that gives the path, for these errors.
    """
    where = f"{name}={path}" if name else str(path)
    value = parse_json(read_text(path, MOST_FILE_BYTES, name), where)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object with keys, got {shown(value)}")
    return value


def json_table(text: str) -> dict[str, str]:
    """{"training.optimizer.lr": "1e-06", ...}: the values of nested objects as JSON, by their keys
    from the outermost on. An object without keys has none. `text` is valid JSON."""

    def entries(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, str]]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from entries(value, f"{above}{key}.")
            else:
                yield above + key, json.dumps(value)

    return dict(entries(json.loads(text), ""))


def read_text(path: Path, most: int, name: str = "") -> str:
    """The text of a file of at most `most` bytes, UTF-8. `name` and errors: as of `reading`."""
    with reading(path, name, most) as file:
        content = file.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {json_problem(error)}") from error
