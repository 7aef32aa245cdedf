"""Weights in chunks, as weight stores hand them out: where each lies in its tensor, and its
checksum.

Each process cuts its blocks of a tensor alike, into chunks of a few MiB along the longest dims.
All chunks of a tensor form a grid: in each dim their intervals follow one another. Pure NumPy.
"""

import dataclasses
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distflow_jax.parsing.checked_fields import OBJECT, SIZE, TEXT, check_fields
from distflow_jax.parsing.json_text import parse_json
from distflow_jax.stream.wire.calls import Bytes

CHUNK_BYTES = 4 << 20
_MOST_DIMS = 16

Place = tuple[str, tuple[int, ...]]  # path of a tensor, first element of a chunk


@dataclasses.dataclass(frozen=True)
class ChunkSpec:
    """Where a chunk lies in its tensor, and the CRC-32 of its bytes in C order."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def within(self, start: Sequence[int]) -> tuple[slice, ...]:
        """The chunk as an index into a block that begins at `start`."""
        places = zip(self.start, self.shape, start, strict=True)
        return tuple(slice(a - of, a - of + n) for a, n, of in places)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor, and the chunks of it that a process has."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[ChunkSpec, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The chunks that a process has of one version of the weights."""

    attempt: str
    version: int
    tensors: Mapping[str, TensorSpec]

    def encode(self) -> bytes:
        """As JSON."""
        tensors = {
            path: [t.shape, t.dtype, [[*c.start, *c.shape, c.checksum] for c in t.chunks]]
            for path, t in self.tensors.items()
        }
        named = {"attempt": self.attempt, "version": self.version}
        return json.dumps(named | {"tensors": tensors}, separators=(",", ":")).encode()


def read_manifest(data: Bytes, place: str) -> Manifest:
    """Inverse of Manifest.encode. ValueError, which begins with `place`, for what is none."""
    raw = parse_json(data, place)
    if not isinstance(raw, Mapping):
        raise ValueError(f"{place}: the manifest is no object")
    kinds = {"attempt": TEXT, "version": SIZE, "tensors": OBJECT}
    check_fields(raw, kinds, place)
    if lacking := kinds.keys() - raw.keys():
        raise ValueError(f"{place}: the manifest has no {min(lacking)}")
    try:
        tensors = {path: _tensor(value) for path, value in raw["tensors"].items()}
        return Manifest(raw["attempt"], raw["version"], tensors)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place}: the manifest is damaged: {error}") from error


def _tensor(value: Any) -> TensorSpec:
    shape, dtype, rows = value
    dims = len(shape)
    if dims > _MOST_DIMS or not isinstance(dtype, str):
        raise ValueError("a tensor of another kind")
    chunks = []
    for row in rows:
        if len(row) != 2 * dims + 1 or not isinstance(row[-1], int):
            raise ValueError("a chunk of another tensor")
        chunks.append(ChunkSpec(_sizes(row[:dims]), _sizes(row[dims : 2 * dims]), row[-1]))
        for a, n, most in zip(chunks[-1].start, chunks[-1].shape, shape, strict=True):
            if a + n > most or n == 0:
                raise ValueError("a chunk outside its tensor")
    return TensorSpec(_sizes(shape), dtype, tuple(chunks))


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(SIZE.fits(value) for value in values):
        raise ValueError(f"sizes {values!r:.80}")
    return tuple(values)


def cut(
    start: Sequence[int], shape: Sequence[int], itemsize: int, most: int
) -> Iterator[ChunkSpec]:
    """The chunks of a block, of at most `most` bytes: its longest dims are halved until so."""
    if 0 in shape:
        return
    step = list(shape)
    while math.prod(step) * itemsize > most and math.prod(step) > 1:
        longest = step.index(max(step))
        step[longest] = -(-step[longest] // 2)
    begins = [range(0, n, s) for n, s in zip(shape, step, strict=True)]
    for offset in itertools.product(*begins):
        sizes = tuple(min(s, n - o) for s, n, o in zip(step, shape, offset, strict=True))
        yield ChunkSpec(tuple(a + o for a, o in zip(start, offset, strict=True)), sizes)


def checksum(data: Bytes) -> int:
    """CRC-32."""
    return zlib.crc32(data)


def overlap(
    chunk: ChunkSpec, start: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The overlap of a chunk and a block, as indices into both; None: there is none."""
    of_chunk, of_block = [], []
    for a, n, b, m in zip(chunk.start, chunk.shape, start, shape, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        of_chunk.append(slice(low - a, high - a))
        of_block.append(slice(low - b, high - b))
    return tuple(of_chunk), tuple(of_block)


def check_grid(path: str, shape: Sequence[int], chunks: Sequence[ChunkSpec]) -> None:
    """ValueError unless the chunks, each listed once, are all cells of one grid over the tensor.

    Then each element lies in exactly one of them.
    """
    cells = 1
    for dim, size in enumerate(shape):
        intervals = sorted({(chunk.start[dim], chunk.shape[dim]) for chunk in chunks})
        at = 0
        for begin, length in intervals:
            if begin != at:
                raise ValueError(f"{path}: no chunk begins at {at} of dim {dim}, one at {begin}")
            at += length
        if at != size:
            raise ValueError(f"{path}: chunks reach to {at} of {size} in dim {dim}")
        cells *= len(intervals)
    if len(chunks) != cells:
        raise ValueError(f"{path}: {len(chunks)} of {cells} chunks are there")
