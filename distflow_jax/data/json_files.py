"""JSON files with random access to their rows: one row per line, or one array of rows."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from distflow_jax.parsing.json_text import DECODER, json_problem, parse_json, read_text
from distflow_jax.parsing.paths import reading

_SPACE = re.compile(r"[ \t\n\r]*")  # between JSON's tokens
MOST_ROW_BYTES = 16 << 20  # of one row: four million tokens
TOO_LONG = f"has more than {MOST_ROW_BYTES >> 20} MiB: shorten or divide it"
MOST_ARRAY_BYTES = 4 << 30  # of an array, whose text is held in memory
_MOST_SPACE = 65536  # bytes before the first character of a .json file


class JsonLinesReader:
    """A file with one JSON object per line; blank lines are skipped, but count in messages."""

    def __init__(self, path: Path):
        self._path = path
        offsets, lines = [], []
        with reading(path) as file:
            offset = 0
            for line, text in enumerate(_lines(file), start=1):
                if len(text) > MOST_ROW_BYTES:
                    raise ValueError(f"{path}, row {line}: {TOO_LONG}")
                if not _is_blank(text):
                    offsets.append(offset)
                    lines.append(line)
                offset += len(text)
        # only the lines' offsets are kept: the text of a large file stays on disk
        self._offsets = np.array(offsets, np.int64)
        self._lines = np.array(lines, np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, row: int) -> Any:
        """Reads and parses one line."""
        with open(self._path, "rb") as file:
            file.seek(self._offsets[row])
            return self._parse(row, file.readline())

    def rows(self, first: int, end: int) -> Iterator[Any]:
        """Lines in order, parsed."""
        if first == end:
            return
        with open(self._path, "rb") as file:
            file.seek(self._offsets[first])
            texts = (text for text in _lines(file) if not _is_blank(text))
            for row, text in zip(range(first, end), texts, strict=False):
                yield self._parse(row, text)

    def place(self, row: int) -> str:
        """Path and line number."""
        return f"{self._path}, row {self._lines[row]}"

    def _parse(self, row: int, text: bytes) -> Any:
        return parse_json(text, self.place(row))


class JsonArrayReader:
    """A file with one JSON array of objects. Its text is held in memory, its rows are not."""

    def __init__(self, path: Path):
        self._path = path
        self._text = read_text(path, MOST_ARRAY_BYTES)
        self._starts = list(self._scan())

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, row: int) -> Any:
        """Parses one item."""
        return DECODER.raw_decode(self._text, self._starts[row])[0]

    def rows(self, first: int, end: int) -> Iterator[Any]:
        """Items in order, parsed."""
        return map(self.row, range(first, end))

    def place(self, row: int) -> str:
        """Path and number of the item."""
        return f"{self._path}, row {row + 1}"

    def _scan(self) -> Iterator[int]:
        """The first character of every item. Raises ValueError with the item's number."""
        text, end, row = self._text, self._skip_space(self._text.index("[") + 1), 0
        while text[end : end + 1] != "]":
            try:
                if row:
                    self._expect(",", end)
                    end = self._skip_space(end + 1)
                after = DECODER.raw_decode(text, end)[1]
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{self.place(row)}: {json_problem(error, of_file=True)}"
                ) from error
            if after - end > MOST_ROW_BYTES:
                raise ValueError(f"{self.place(row)}: {TOO_LONG}")
            yield end
            end, row = self._skip_space(after), row + 1
        rest = self._skip_space(end + 1)
        if rest < len(text):
            line = text.count("\n", 0, rest) + 1
            raise ValueError(
                f"{self._path}: text after the end of the array in line {line}; give one array of "
                "rows, or one row per line without an array"
            )

    def _expect(self, character: str, at: int) -> None:
        if self._text[at : at + 1] != character:
            raise json.JSONDecodeError(f"Expecting {character!r} or ']'", self._text, at)

    def _skip_space(self, start: int) -> int:
        return _SPACE.match(self._text, start).end()


def json_reader(path: Path) -> JsonLinesReader | JsonArrayReader:
    """The reader of a `.json` file: an array of rows, or one row per line.

    Raises:
      ValueError: one object over several lines, which is neither.
    """
    with reading(path) as file:
        first = file.read(_MOST_SPACE).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if first == b"[":
        return JsonArrayReader(path)
    reader = JsonLinesReader(path)
    if first == b"{" and len(reader):
        try:
            reader.row(0)
        except ValueError:
            _refuse_object(path)
            raise
    return reader


def _refuse_object(path: Path) -> None:
    """Raises ValueError if the whole file is one JSON object."""
    try:
        whole = json.loads(read_text(path, MOST_ARRAY_BYTES))
    except (ValueError, RecursionError):
        return
    arrays = [key for key, value in whole.items() if isinstance(value, list)]
    found = f"; its {arrays[0]!r} is an array: save that alone" if arrays else ""
    raise ValueError(
        f"{path}: one object over several lines; expected an array of rows, or one row per line"
        + found
    )


def _is_blank(line: bytes) -> bool:
    return line.strip() in (b"", codecs.BOM_UTF8)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is too long its beginning, and then its rest as others."""
    while text := file.readline(MOST_ROW_BYTES + 1):
        yield text
