"""Hugging Face's safetensors checkpoints, read by the safetensors package: one file, or shards.

Headers are read when a model is opened, each tensor when it is needed: with pread, since the pages
of a mapped file would count as this process's memory.
"""

import dataclasses
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401, gives NumPy bfloat16 by its name
import numpy as np
from safetensors import SafetensorError, safe_open

from distflow_jax.parsing.checked_fields import OBJECT, TEXT, check_fields
from distflow_jax.parsing.json_text import read_json_object
from distflow_jax.parsing.one_line import one_line, shown
from distflow_jax.parsing.paths import names_file, reading

_DTYPES = ("BF16", "F16", "F32", "F64")  # of weights; tensors of others may lie beside them
_MAX_HEADER = 100_000_000  # bytes; the limit of the package
_LFS_POINTER = b"version https://git-lfs.github.com/"


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file, or a block of one: `shape` is the block's."""

    path: Path
    name: str  # in the file
    dtype: str  # as named there
    shape: tuple[int, ...]
    block: tuple[int, slice] | None = None  # index into the tensor; None: the whole

    def split(self, count: int) -> "list[TensorInfo]":
        """The tensor [E, rows, columns] as `count` tensors [E * rows / count, columns]."""
        experts, rows, columns = self.shape
        size = experts * rows // count
        return [
            dataclasses.replace(
                self, shape=(size, columns), block=(e, slice(n * size, (n + 1) * size))
            )
            for e in range(experts)
            for n in range(count // experts)
        ]


@dataclasses.dataclass(frozen=True)
class SafetensorsFiles:
    """The headers of a checkpoint's files; tensors are read from disk on demand."""

    paths: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    _opened: dict[Path, safe_open] = dataclasses.field(default_factory=dict, repr=False)

    def check_dtype(self, name: str) -> None:
        """Raises ValueError if the dtype of a tensor is not one of weights."""
        info = self.tensors[name]
        if info.dtype not in _DTYPES:
            raise ValueError(
                f"{info.path}: tensor {one_line(name)} has dtype {info.dtype}, supported are "
                f"{', '.join(_DTYPES)}: convert it to one of these"
            )

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """One tensor in the dtype of its file, or rows of one; no more is read than is returned.

        Raises ValueError if the dtype is not one of weights, or the file cannot be read.
        """
        info = self.tensors[name]
        self.check_dtype(name)
        index = info.block if rows is None else rows
        with _errors_of(info.path):
            if index is not None:  # by a map: with pread, a slice reads the whole tensor first
                return safe_open(info.path, "np").get_slice(info.name)[index]
            return self._file(info.path).get_tensor(info.name)

    def _file(self, path: Path) -> safe_open:
        """The file, which stays open until another one is read."""
        file = self._opened.get(path)
        if file is None:
            self._opened.clear()
            file = self._opened[path] = safe_open(path, "np", backend="pread")
        return file

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}}


def is_safetensors(path: Path) -> bool:
    """Whether a file starts like safetensors: with a header's length and a JSON object."""
    with reading(path) as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] < _MAX_HEADER


def unfetched(paths: Iterable[Path]) -> str:
    """End of a message on files without weights: the fix if one is a pointer of git-lfs, or ""."""
    for path in paths:
        with reading(path) as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return f"; {path.name} is a pointer of git-lfs: run git lfs pull"
    return ""


def read_index(path: Path) -> dict[str, str] | None:
    """{tensor name: file name} of a shard index; None if `path` is a JSON object without one.

    Raises ValueError if it is no JSON object, or its map is not one of names.
    """
    raw = read_json_object(path)
    check_fields(raw, {"weight_map": OBJECT}, str(path))
    index = raw.get("weight_map")
    if index is not None:
        check_fields(index, dict.fromkeys(index, TEXT), f"{path}: weight_map")
    return index


def open_safetensors(path: Path) -> SafetensorsFiles:
    """Headers of one safetensors file. Raises ValueError if it is damaged, or is none."""
    return SafetensorsFiles((path,), _read_header(path))


def open_sharded(index_path: Path, index: Mapping[str, str]) -> SafetensorsFiles:
    """Headers of all shards of an index, which must be in its folder."""
    # the file name only: an index could lead out of its folder
    paths = {name: index_path.parent / Path(name).name for name in sorted(set(index.values()))}
    absent = [name for name, path in paths.items() if not names_file(path)]
    if absent:
        raise FileNotFoundError(
            f"{index_path} lists {one_line(', '.join(absent))}, which its folder does not have"
        )
    headers = {name: _read_header(path) for name, path in paths.items()}
    for tensor, shard in index.items():
        if tensor not in headers[shard]:
            raise ValueError(
                f"{index_path} lists {shown(tensor)} in {shown(shard)}, which does not have it"
            )
    tensors: dict[str, TensorInfo] = {}
    for shard, header in headers.items():
        for tensor, info in header.items():
            if tensor in tensors:
                raise ValueError(
                    f"{shown(tensor)} is in {tensors[tensor].path.name} and in {shown(shard)}"
                )
            tensors[tensor] = info
    return SafetensorsFiles(tuple(paths.values()), tensors)


def _read_header(path: Path) -> dict[str, TensorInfo]:
    if not is_safetensors(path):
        raise ValueError(f"{path} is not a safetensors file{unfetched([path])}")
    with _errors_of(path), safe_open(path, "np") as file:
        views = {name: file.get_slice(name) for name in file.offset_keys()}
    return {
        name: TensorInfo(path, name, view.get_dtype(), tuple(view.get_shape()))
        for name, view in views.items()
    }


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """A block whose errors are those of one file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {one_line(str(error))}") from error
    except (SafetensorError, ValueError) as error:  # ValueError: a shape that NumPy does not have
        raise ValueError(
            f"{path} is not a valid safetensors file, truncated or corrupt "
            f"({one_line(str(error))}): fetch or export it again"
        ) from error
