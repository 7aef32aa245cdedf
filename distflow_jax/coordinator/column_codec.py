"""Column entries <-> bytes, for entries that move to another process.

An entry is an array or a number of any fixed-size NumPy type. An entry that is the same object as
the entry before (a prompt of several samples, an image of several questions) takes one byte.
"""

import math
import re
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

_SAME = b"="
_ARRAY = b"a"
_NAMES = re.compile(r"[<>|=][biufcmMSUV]\d+(\[\w+\])?")  # of types


def encode(entries: Iterable[Any], what: str) -> bytes:
    """Entries -> bytes. ValueError, which names `what`, for an entry that is no array or number."""
    chunks = []
    before = None
    for entry in entries:
        if chunks and entry is before:
            chunks.append(_SAME)
            continue
        array = np.asarray(entry)
        if array.dtype.hasobject:
            raise ValueError(
                f"field {what!r} holds a {type(entry).__name__}, which cannot move to another "
                "process: write arrays or numbers"
            )
        dtype = array.dtype.str.encode()
        header = struct.pack("<BB", len(dtype), array.ndim)
        chunks += [_ARRAY, header, dtype, struct.pack(f"<{array.ndim}q", *array.shape)]
        chunks.append(np.ascontiguousarray(array).tobytes())
        before = entry
    return b"".join(chunks)


def decode(data: bytes | bytearray, most: int | None = None) -> list[Any]:
    """Inverse of encode: arrays (read-only), and NumPy scalars for numbers.

    ValueError for a tag, a type or a shape that `encode` does not write, or that has no bytes, and
    for more than `most` entries: one of a byte takes a hundred in memory.
    """
    entries: list[Any] = []
    at = 0
    while at < len(data):
        if len(entries) == most:
            raise ValueError(f"more than {most} entries")
        tag, at = data[at : at + 1], at + 1
        if tag == _SAME:
            entries.append(entries[-1])
            continue
        if tag != _ARRAY:
            raise ValueError(f"an entry begins with {tag!r}, which is no tag")
        dtype_size, ndim = struct.unpack_from("<BB", data, at)
        at += 2
        name = data[at : at + dtype_size].decode()
        if not _NAMES.fullmatch(name):  # NumPy would parse it as Python
            raise ValueError(f"an entry of type {name!r:.40}")
        dtype = np.dtype(name)
        at += dtype_size
        shape = struct.unpack_from(f"<{ndim}q", data, at)
        at += 8 * ndim
        if any(size < 0 for size in shape):  # NumPy would take it for all that is left
            raise ValueError(f"an entry has the shape {list(shape)}")
        count = math.prod(shape)
        if count * dtype.itemsize > len(data) - at:
            raise ValueError(
                f"an entry has the shape {list(shape)}, {len(data) - at} bytes are left"
            )
        array = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
        entries.append(array[()] if ndim == 0 else array)
    return entries
