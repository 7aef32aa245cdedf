"""Writer of safetensors files, tensor by tensor: one file, or shards with an index.

A file's header depends on names and shapes only, so it is written first and every tensor goes
directly to its place. Only one tensor is in memory; the safetensors package's own writer takes the
whole content of a file. Format: huggingface.co/docs/safetensors
"""

import dataclasses
import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

INDEX_FILE = "model.safetensors.index.json"
DTYPES = {  # name on the command line -> (name in the file's header, NumPy dtype)
    "float32": ("F32", np.dtype("<f4")),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float16": ("F16", np.dtype("<f2")),
}
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape

_AT_ONCE = 1 << 20  # values to cast at once: those of a whole embedding would take gigabytes
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500MB", "2GiB" or "1000000". Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise ValueError(f"size {text!r} is not valid: write it as 5GB, 500MB or 2GiB")
    return size


def plan_shards(shapes: Shapes, dtype: str, max_bytes: int) -> dict[str, list[str]]:
    """Division of tensors into files, in the order of `shapes`: {file name: tensor names}.

    A file has at most `max_bytes` of tensors, unless a single tensor is larger.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = num_bytes(shape, dtype)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {
        f"model-{number:05}-of-{len(shards):05}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of one tensor in a file of this dtype."""
    return math.prod(shape) * DTYPES[dtype][1].itemsize


@dataclasses.dataclass
class Lost:
    """Numbers of values that a cast could not represent."""

    above: int = 0  # finite values that became infinite
    below: int = 0  # nonzero values that became 0
    not_finite: int = 0  # values that were infinite or nan before


class SafetensorsWriter:
    """Writes all tensors of `shapes` into `folder`, in any order.

    A context manager; the end of the block raises ValueError if a tensor was not written.
    """

    def __init__(self, folder: Path, shapes: Shapes, dtype: str, max_bytes: int):
        self.lost = Lost()
        self._folder, self._shapes = folder, shapes
        self._name, (self._code, self._dtype) = dtype, DTYPES[dtype]
        self._shards = plan_shards(shapes, dtype, max_bytes)
        self._file_of = {name: file for file, names in self._shards.items() for name in names}
        self._missing = set(shapes)
        self._offsets: dict[str, int] = {}  # of the tensors in files that were begun
        self._open: tuple[str, BinaryIO] | None = None

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        self._close()
        if kind is None and self._missing:
            raise ValueError(f"tensors not written: {', '.join(sorted(self._missing)[:8])}")
        if kind is None and len(self._shards) > 1:
            size = sum(num_bytes(s, self._name) for s in self._shapes.values())
            index = {"metadata": {"total_size": size}, "weight_map": self._file_of}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", "utf-8")

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Casts one tensor, of the shape [...] in `shapes`, to the files' dtype and writes it.

        Raises ValueError for an unknown name, another shape, or a second tensor of a name.
        """
        if name not in self._missing or tensor.shape != tuple(self._shapes[name]):
            wanted = self._shapes.get(name, "no such tensor, or a second one")
            raise ValueError(f"tensor {name} {list(tensor.shape)} does not fit, expected {wanted}")
        file = self._at(name)
        values = np.ascontiguousarray(tensor).reshape(-1)
        for start in range(0, values.size, _AT_ONCE):
            file.write(self._cast(values[start : start + _AT_ONCE]).view(np.uint8).data)
        self._missing.remove(name)

    def _cast(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            cast = values.astype(self._dtype, copy=False)
        finite = np.isfinite(values)
        self.lost.not_finite += values.size - int(np.count_nonzero(finite))
        if cast.dtype != values.dtype:
            self.lost.above += int(np.count_nonzero(finite & ~np.isfinite(cast)))
            self.lost.below += int(np.count_nonzero((cast == 0) & (values != 0)))
        return cast

    def _at(self, name: str) -> BinaryIO:
        """The tensor's file, positioned at the tensor's first byte."""
        path = self._folder / self._file_of[name]
        if self._open is None or self._open[0] != path.name:
            self._close()
            begun = name in self._offsets
            self._open = path.name, path.open("r+b" if begun else "xb")
            if not begun:
                self._begin(*self._open)
        file = self._open[1]
        if file.tell() != self._offsets[name]:
            file.seek(self._offsets[name])
        return file

    def _begin(self, name: str, file: BinaryIO) -> None:
        """Writes a file's header and records the offsets of its tensors."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
        ends = 0
        for tensor in self._shards[name]:
            shape, start = self._shapes[tensor], ends
            ends += num_bytes(shape, self._name)
            header[tensor] = {
                "dtype": self._code,
                "shape": list(shape),
                "data_offsets": [start, ends],
            }
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)  # tensors begin at a multiple of 8
        file.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in self._shards[name]:
            self._offsets[tensor] = 8 + len(raw) + header[tensor]["data_offsets"][0]

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None
