"""Data files with random access to their rows: JSON lines and arrays, CSV, Parquet, Arrow."""

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from distflow_jax.data.column_choice import TRAINING, ColumnsKey
from distflow_jax.data.example import Example
from distflow_jax.data.file_columns import example_from_row
from distflow_jax.data.hub import WITHOUT_SCHEME
from distflow_jax.data.json_files import MOST_ROW_BYTES, TOO_LONG, JsonLinesReader, json_reader
from distflow_jax.data.message_forms import MESSAGE_COLUMNS, VARIABLES, without_nulls
from distflow_jax.data.pictures.image_paths import image_folders
from distflow_jax.data.row_share import RowShare
from distflow_jax.did_you_mean import near_file
from distflow_jax.parsing.checked_fields import is_missing
from distflow_jax.parsing.one_line import one_line
from distflow_jax.parsing.paths import checked_path, named_path, reading

CHECK_ROWS = 1024  # rows of a table that the schema check converts at a time


# errors of pyarrow for what a file holds; most of its own are ValueErrors
TABLE_ERRORS = (pa.ArrowException, ValueError, OverflowError, KeyError, MemoryError, TypeError)


class Reader(Protocol):
    """Rows of one file as dicts, numbered from 0 inside and from 1 in messages."""

    def __len__(self) -> int: ...

    def row(self, row: int) -> Any:
        """One row, column name -> value."""

    def rows(self, first: int, end: int) -> Iterator[Any]:
        """The rows from `first` up to `end`, faster than one by one."""

    def place(self, row: int) -> str:
        """File and row number from 1: the start of an error message."""


class TableReader:
    """A Parquet or CSV file (held in memory) or an Arrow file (mapped from disk)."""

    def __init__(self, path: Path):
        self._path = path
        try:
            self._table = _TABLES.get(path.suffix, _arrow_table)(path)
            # a damaged file has offsets that lead out of its buffers, where reading a row crashes
            self._table.validate(full=True)
        except (*TABLE_ERRORS, OSError) as error:
            raise ValueError(
                f"{path}: not a readable {path.suffix} file, truncated or damaged: write it again "
                f"({one_line(str(error))})"
            ) from error
        names = self._table.schema.names
        for name in names:
            if names.count(name) > 1:  # a row would have the last of them
                raise ValueError(f"{path}: several columns are named {name!r}: rename or drop one")

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, row: int) -> Any:
        """One row as Python objects."""
        try:
            return self._table.slice(row, 1).to_pylist()[0]
        except TABLE_ERRORS as error:  # a time beyond year 9999, a time zone that does not exist
            raise ValueError(
                f"{self.place(row)}: a value has no form in Python ({one_line(str(error))}): leave "
                "its column out, or write it as text"
            ) from error

    def rows(self, first: int, end: int) -> Iterator[Any]:
        """Rows as Python objects, converted in batches."""
        start = first
        for batch in self._table.slice(first, end - first).to_batches(max_chunksize=CHECK_ROWS):
            rows: Iterable[Any] = map(self.row, range(start, start + batch.num_rows))  # one by one
            if not (is_large := batch.nbytes > MOST_ROW_BYTES):  # of one row, or of all
                with contextlib.suppress(*TABLE_ERRORS):  # one by one they are named
                    rows = batch.to_pylist()
            for row in rows:
                if is_large and _num_bytes(row) > MOST_ROW_BYTES:
                    raise ValueError(f"{self.place(start)}: {TOO_LONG}")
                yield row
                start += 1

    def place(self, row: int) -> str:
        """Path and row number."""
        return f"{self._path}, row {row + 1}"


READERS: dict[str, Callable[[Path], Reader]] = {
    ".jsonl": JsonLinesReader,
    ".json": json_reader,
    ".csv": TableReader,
    ".parquet": TableReader,
    ".arrow": TableReader,
    ".feather": TableReader,
}


class FileDataset:
    """Rows of one or more files in order, to be used after `check_rows`.

    The fingerprint hashes the bytes of all files in order, which the check reads anyway, and the
    prompt options and the chosen columns, which are part of the rows, and the sizes of the images'
    files; not the files' names.
    """

    def __init__(
        self,
        paths: list[Path],
        name: str,
        *,
        data_source: str | None = None,
        system_prompt: str = "",
        prompt_suffix: str = "",
        columns: Mapping[str, str] = MappingProxyType({}),
        columns_key: ColumnsKey = TRAINING,
        image_root: str = "",
    ):
        self.name = name
        wording = {"system_prompt": system_prompt, "prompt_suffix": prompt_suffix}
        self._options = wording | {"columns": dict(columns), "columns_key": columns_key}
        self._data_sources = [data_source or path.stem for path in paths]
        self._folders = [image_folders(path, image_root) for path in paths]
        self._readers: list[Reader] = [READERS[path.suffix](path) for path in paths]
        digest = hashlib.blake2b(json.dumps(wording).encode(), digest_size=16)
        if columns:
            digest.update(json.dumps(dict(columns), sort_keys=True).encode())
        for path in paths:
            with reading(path) as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        # starts[i] is the row of the data set at which file i begins
        self._starts = np.cumsum([0, *map(len, self._readers)])
        if not len(self):
            raise ValueError(f"{name} has no rows")
        self.first_image_row: int | None = None
        self.without_truth: list[int] = []
        self.content = digest  # of files and options
        self.fingerprint, self.share = "", None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> Example:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        i, row = self._find(row)
        return self._example(i, row, self._readers[i].row(row))

    def examples(self, first: int, end: int) -> Iterator[Example]:
        """The rows from `first` up to `end`, faster than one by one."""
        for i, reader in enumerate(self._readers):
            start, length = int(self._starts[i]), len(reader)
            low, high = (min(max(row - start, 0), length) for row in (first, end))
            for row, values in enumerate(reader.rows(low, high), low):
                yield self._example(i, row, values)

    def place(self, row: int) -> str:
        """File and row number of a row, counted in its file from 1."""
        i, row = self._find(row)
        return self._readers[i].place(row)

    def _find(self, row: int) -> tuple[int, int]:
        """(number of the file, row in it)."""
        i = int(np.searchsorted(self._starts, row, side="right")) - 1
        return i, row - int(self._starts[i])

    def _example(self, i: int, row: int, values: Any) -> Example:
        if isinstance(self._readers[i], TableReader):
            names = [self._options["columns"].get(c, c) for c in (*MESSAGE_COLUMNS, *VARIABLES)]
            values |= {name: without_nulls(values[name]) for name in names if name in values}
        return example_from_row(
            values,
            self._readers[i].place(row),
            data_source=self._data_sources[i],
            folders=self._folders[i],
            **self._options,
        )


def check_rows(dataset: FileDataset, share: RowShare | None = None) -> FileDataset:
    """Checks all rows, each in the process of its share, unless an earlier start has; returns the
    data set. Raises ValueError or FileNotFoundError for the first row that does not fit the schema.
    """
    dataset.share = share or RowShare()
    for size in _checked(dataset, dataset.share):
        dataset.content.update(str(size).encode())
    dataset.fingerprint = dataset.content.hexdigest()
    return dataset


def _checked(dataset: FileDataset, share: RowShare) -> list[int]:
    """Checks all rows; returns the bytes of their images' files, in the order of the rows."""
    content = dataset.content.hexdigest()
    others = [i for i, text in enumerate(share.gather(content)) if text != content]
    if others:
        raise ValueError(
            f"{dataset.name}: process {others[0]} reads other rows than process {share.index}; "
            "give all hosts the same files"
        )
    key = ["checked rows", content]
    if kept := share.known(key):  # of rows without images, which nobody can change by a file
        dataset.without_truth = kept["without_truth"].tolist()
        return []
    first, end = share.of(len(dataset))
    without_truth, images, sizes = [], [], []
    with share.agreeing():
        for row, example in enumerate(dataset.examples(first, end), first):
            if is_missing(example.ground_truth):
                without_truth.append(row)
            images += [row] * bool(example.images)
            for image in example.images:
                image.check()
                sizes.append(image.bytes_on_disk())
    missing, seeing, files = (
        share.whole(np.array(found, np.int64)) for found in (without_truth, images, sizes)
    )
    dataset.without_truth = missing.tolist()
    dataset.first_image_row = int(seeing[0]) if len(seeing) else None
    if not len(seeing):
        share.keep(key, without_truth=missing)
    return files.tolist()


def find_files(spec: str) -> list[Path]:
    """The files of a path, a folder of data files, or a glob pattern, sorted by path.

    Raises:
      FileNotFoundError: no such file (the message names the nearest), or none in the folder.
      ValueError: a file with an unknown ending.
    """
    path = named_path("data file", spec)
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        checked_path("folder", "data folder", spec)
        paths = sorted(p for p in path.iterdir() if p.suffix in READERS)
        if not paths:
            raise FileNotFoundError(f"folder {spec} holds none of {', '.join(READERS)}")
    elif glob.has_magic(spec):
        found = {os.path.realpath(p): p for p in sorted(glob.glob(str(path), recursive=True))[::-1]}
        paths = [Path(p) for p in sorted(found.values())]  # links may lead to a file again
        if not paths:
            raise FileNotFoundError(f"no file matches {spec}")
    else:
        with contextlib.suppress(FileNotFoundError):
            checked_path("file", "data file", spec)  # says what else it may be
        of_hub = WITHOUT_SCHEME.fullmatch(spec) and path.suffix not in READERS
        near = f"; did you mean hf:{spec}?" if of_hub and not path.parent.is_dir() else ""
        raise FileNotFoundError(f"data file {spec} does not exist{near or near_file(path)}")
    for path in paths:
        if path.suffix not in READERS:
            raise ValueError(f"data file {path} has an unknown ending; known: {', '.join(READERS)}")
    return paths


def _num_bytes(value: Any) -> int:
    """Bytes of the texts and numbers in a row; pictures, which are bytes, have their own bound."""
    if isinstance(value, dict | list):
        return sum(map(_num_bytes, value.values() if isinstance(value, dict) else value))
    return len(value.encode()) if isinstance(value, str) else 0 if isinstance(value, bytes) else 8


def _arrow_table(path: Path) -> pa.Table:
    with reading(path) as file:
        is_file_format = file.read(6) == b"ARROW1"  # else the stream format, which has no magic
    source = pa.memory_map(str(path))
    return (pa.ipc.open_file if is_file_format else pa.ipc.open_stream)(source).read_all()


def _csv_table(path: Path) -> pa.Table:
    """All cells are text as it stands in the file; an empty one is null."""
    layout = pcsv.ParseOptions(newlines_in_values=True)
    blocks = pcsv.ReadOptions(block_size=2 * MOST_ROW_BYTES)  # none is cut within a row
    with pcsv.open_csv(path, parse_options=layout, read_options=blocks) as file:
        texts = dict.fromkeys(file.schema.names, pa.string())
    cells = pcsv.ConvertOptions(column_types=texts, null_values=[""], strings_can_be_null=True)
    return pcsv.read_csv(path, parse_options=layout, read_options=blocks, convert_options=cells)


_TABLES = {".parquet": pq.read_table, ".csv": _csv_table}  # others are Arrow's own
