"""Hugging Face's safetensors checkpoints: one file, or shards with an index.

The header is JSON (huggingface.co/docs/safetensors); tensors are views of the mapped file. Parsing
it here supports bfloat16 and float8 by ml_dtypes, with any release of the safetensors package.
"""

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from distflow_jax.parsing.checked_fields import OBJECT, TEXT, Kind, check_fields
from distflow_jax.parsing.json_text import parse_json, read_json_object
from distflow_jax.parsing.one_line import one_line, shown
from distflow_jax.parsing.paths import names_file, reading

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
# dtypes of the format that no weight has, and their bytes: such tensors may lie beside weights
_OTHER_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4}
_OTHER_BYTES |= {"U64": 8, "I64": 8, "C64": 8, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}
_ITEM_BYTES = _OTHER_BYTES | {name: dtype.itemsize for name, dtype in _DTYPES.items()}
_MOST_OFFSET = 1 << 62
_MAX_HEADER = 100_000_000  # bytes; the limit of the format's own reader


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Place of a tensor: file, dtype as named there, offset in bytes from the file's start."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def split(self, count: int) -> "list[TensorInfo]":
        """The tensor [E, rows, columns] as `count` tensors [E * rows / count, columns]."""
        shape = (self.shape[0] * self.shape[1] // count, self.shape[2])
        size = math.prod(shape) * _ITEM_BYTES[self.dtype]
        offsets = [self.offset + n * size for n in range(count)]
        return [dataclasses.replace(self, shape=shape, offset=offset) for offset in offsets]


@dataclasses.dataclass(frozen=True)
class SafetensorsFiles:
    """The headers of a checkpoint's files; tensors are read from disk on demand."""

    paths: tuple[Path, ...]
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """One tensor in the dtype of its file: a read-only view of the mapped file."""
        info = self.tensors[name]
        if info.dtype not in _DTYPES:
            raise ValueError(
                f"{info.path}: tensor {name} has dtype {info.dtype}, supported are "
                f"{', '.join(sorted(_DTYPES))}"
            )
        if 0 in info.shape:  # nothing to map
            return np.zeros(info.shape, _DTYPES[info.dtype])
        return np.memmap(info.path, _DTYPES[info.dtype], "r", info.offset, info.shape)


def is_safetensors(path: Path) -> bool:
    """Whether a file starts like safetensors: with a header's length and a JSON object."""
    with reading(path) as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] < _MAX_HEADER


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
    """Headers of one safetensors file."""
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
    file_size = path.stat().st_size
    if not is_safetensors(path):
        raise ValueError(f"{path} is not a safetensors file")
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        raw = file.read(size)
    if len(raw) != size:
        raise ValueError(
            f"{path} is truncated: its header of {size} bytes ends at byte {file_size}"
        )
    header = parse_json(raw, f"{path} is not a valid safetensors file, its header")
    infos, place = {}, f"{path} is not a valid safetensors file, truncated or corrupt"
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        check_fields({name: entry}, {name: _ENTRY}, place)
        begin, end = entry["data_offsets"]
        infos[name] = TensorInfo(path, entry["dtype"], tuple(entry["shape"]), 8 + size + begin)
        size_of = math.prod(entry["shape"]) * _ITEM_BYTES[entry["dtype"]]
        if size_of != end - begin:
            raise ValueError(
                f"{place}: tensor {one_line(name)} {shown(entry['shape'])} does not fill its "
                f"{end - begin} bytes"
            )
    _check_filled(
        place,
        [tuple(e["data_offsets"]) for n, e in header.items() if n in infos],
        file_size - 8 - size,
    )
    return infos


def _check_filled(place: str, spans: list[tuple[int, int]], size: int) -> None:
    """Raises ValueError unless the spans cover `size` bytes, each once, as the format demands."""
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise ValueError(
                f"{place}: no tensor, or two, begin at byte {min(at, begin)} of the data"
            )
        at = end
    if at != size:
        raise ValueError(f"{place}: the tensors end at byte {at} of the data, which has {size}")


def _is_offset(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_OFFSET


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return False
    offsets, shape = entry.get("data_offsets"), entry.get("shape")
    return (
        isinstance(entry.get("dtype"), str)
        and entry["dtype"] in _ITEM_BYTES
        and isinstance(shape, list)
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(map(_is_offset, [*shape, *offsets]))
        and offsets[0] <= offsets[1]
    )


_ENTRY = Kind(
    f"a tensor with shape, data_offsets (none negative) and a dtype of {', '.join(_ITEM_BYTES)}",
    _is_entry,
)
