"""Hugging Face's safetensors checkpoints: one file, or shards with an index.

The header is JSON (huggingface.co/docs/safetensors); tensors are views of the mapped file. Parsing
it here supports bfloat16 and float8 by ml_dtypes, with any release of the safetensors package.
"""

import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_MAX_HEADER = 100_000_000  # bytes; the limit of the format's own reader


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Place of a tensor: file, dtype as named there, offset in bytes from the file's start."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


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
        return np.memmap(info.path, _DTYPES[info.dtype], "r", info.offset, info.shape)


def is_safetensors(path: Path) -> bool:
    """Whether a file starts like safetensors: with a header's length and a JSON object."""
    with path.open("rb") as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] < _MAX_HEADER


def read_index(path: Path) -> dict[str, str] | None:
    """{tensor name: file name} of a shard index; None if `path` is not one."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except ValueError:
        return None
    return raw.get("weight_map") if isinstance(raw, Mapping) else None


def open_safetensors(path: Path) -> SafetensorsFiles:
    """Headers of one safetensors file."""
    return SafetensorsFiles((path,), _read_header(path))


def open_sharded(index_path: Path, index: Mapping[str, str]) -> SafetensorsFiles:
    """Headers of all shards of an index, which must be in its folder."""
    # the file name only: an index could lead out of its folder
    paths = {name: index_path.parent / Path(name).name for name in sorted(set(index.values()))}
    absent = [name for name, path in paths.items() if not path.is_file()]
    if absent:
        raise FileNotFoundError(
            f"{index_path} lists {', '.join(absent)}, which its folder does not have"
        )
    headers = {name: _read_header(path) for name, path in paths.items()}
    for tensor, shard in index.items():
        if tensor not in headers[shard]:
            raise ValueError(f"{index_path} lists {tensor} in {shard}, which does not have it")
    tensors: dict[str, TensorInfo] = {}
    for shard, header in headers.items():
        for tensor, info in header.items():
            if tensor in tensors:
                raise ValueError(f"{tensor} is in {tensors[tensor].path.name} and in {shard}")
            tensors[tensor] = info
    return SafetensorsFiles(tuple(paths.values()), tensors)


def _read_header(path: Path) -> dict[str, TensorInfo]:
    file_size = path.stat().st_size
    if not is_safetensors(path):
        raise ValueError(f"{path} is not a safetensors file")
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        raw = file.read(size)
    try:
        header = json.loads(raw)
        return {
            name: _tensor_info(path, name, entry, 8 + size, file_size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a valid safetensors file, truncated or corrupt: {error}"
        ) from error


def _tensor_info(
    path: Path, name: str, entry: Mapping[str, Any], start: int, file_size: int
) -> TensorInfo:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if start + end > file_size:
        raise ValueError(f"tensor {name} ends at byte {start + end} of {file_size}")
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is not None and int(np.prod(shape, dtype=object)) * dtype.itemsize != end - begin:
        raise ValueError(f"tensor {name} {list(shape)} does not fill its {end - begin} bytes")
    return TensorInfo(path, entry["dtype"], shape, start + begin)
