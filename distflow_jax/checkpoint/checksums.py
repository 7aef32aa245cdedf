"""Checksums of a checkpoint's files, which find damage that leaves a file's size as it was.

    FOLDER/STEP/checksums.json   {file: [bytes, CRC-32]}, written before the checkpoint has its name
    FOLDER/STEP/sizes.json       {file: bytes}, in checkpoints of older versions

TensorStore's OCDBT format keeps checksums of its index nodes, none of the arrays' values. A CRC-32
(ITU-T V.42, as in zlib) finds every error of a single burst of up to 32 bits, and others but for
one in 4e9. Each process reads back the files that it wrote, from the system's cache, and verifies
its share of all files before a restore.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath

FILE = "checksums.json"
SIZES_FILE = "sizes.json"
Checksum = list[int]  # [bytes, CRC-32]
_BLOCK = 1 << 18  # bytes read at once: they stay in a core's cache
_THREADS = 4  # zlib and reads release the interpreter's lock


def checksum(path: epath.Path) -> Checksum:
    """[bytes, CRC-32] of a file's content."""
    size = crc = 0
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb") as file:
        while count := file.readinto(block):
            size, crc = size + count, zlib.crc32(block[:count], crc)
    return [size, crc]


def write_part(folder: epath.Path, index: int) -> None:
    """Writes the checksums of the files below `folder`, all of which process `index` wrote."""
    found = {path.relative_to(folder).as_posix(): path for path in files(folder)}
    _part(folder, index).write_text(json.dumps(_checksums(found)))


def write(checkpoint: epath.Path, items: Sequence[str], parts: Mapping[epath.Path, int]) -> None:
    """Writes checksums.json of a complete checkpoint: of all files below its folders `items`.

    `parts` are the folders of which `write_part` of that process wrote the checksums; they are
    taken over. All others are made here.
    """
    known: dict[str, Checksum] = {}
    for folder, index in parts.items():
        part, prefix = _part(folder, index), folder.relative_to(checkpoint).as_posix()
        known |= {f"{prefix}/{name}": found for name, found in json.loads(part.read_text()).items()}
        part.unlink()
    names = {
        path.relative_to(checkpoint).as_posix(): path
        for item in items
        for path in files(checkpoint / item)
    }
    others = {name: path for name, path in names.items() if name not in known}
    table = {name: known[name] for name in names if name in known} | _checksums(others)
    (checkpoint / FILE).write_text(json.dumps(table, indent=0))


def damage(checkpoint: epath.Path, index: int = 0, count: int = 1) -> str:
    """The first damaged file of those that process `index` of `count` verifies; "" if none is.

    Every file belongs to one process. Of a checkpoint without checksums the sizes are compared.
    """
    table, failure = _table(checkpoint)
    if failure:
        return failure
    mine = sorted(table, key=lambda name: (-table[name][0], name))[index::count]
    found = _each(lambda name: _wrong(checkpoint / name, name, table[name]), mine)
    return next(filter(None, found), "")


def has_checksums(checkpoint: epath.Path) -> bool:
    """Whether a checkpoint has checksums; one of an older version has sizes alone."""
    return not (checkpoint / SIZES_FILE).exists()


def digest(checkpoint: epath.Path) -> str:
    """Hex digest of the table of a checkpoint's files; differs if any of them does."""
    table, failure = _table(checkpoint)
    if failure:
        raise ValueError(f"checkpoint {checkpoint} cannot be read ({failure})")
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def quick_damage(checkpoint: epath.Path, item: str) -> str:
    """As `damage`, of the files of one item alone; of the others only sizes are compared."""
    table, failure = _table(checkpoint)
    if failure:
        return failure
    for name, entry in table.items():
        whole = name.startswith(f"{item}/")
        if found := _wrong(checkpoint / name, name, entry if whole else entry[:1]):
            return found
    return ""


def files(folder: epath.Path) -> Iterator[epath.Path]:
    """All files below a folder, sorted."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def _part(folder: epath.Path, index: int) -> epath.Path:
    return folder.parent / f"checksums.{index}.json"


def _table(checkpoint: epath.Path) -> tuple[dict[str, list[int]], str]:
    """({file: [bytes, CRC-32] or [bytes]}, "") of a checkpoint, or ({}, why it has none)."""
    name = FILE if has_checksums(checkpoint) else SIZES_FILE
    try:
        table = json.loads((checkpoint / name).read_text())
        if name == SIZES_FILE:
            table = {file: [size] for file, size in table.items()}
        length = 1 if name == SIZES_FILE else 2
        for file, entry in table.items():
            if len(entry) != length or not all(type(number) is int for number in entry):
                return {}, f"{name} has no checksum of {file}"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return {}, f"{name}: {type(error).__name__}"
    return table, ""


def _wrong(path: epath.Path, name: str, entry: list[int]) -> str:
    """The damage of a file in words; "" if it has none."""
    if not path.exists():
        return f"{name} is missing"
    size = path.stat().length
    if size != entry[0]:
        return f"{name} has {size} bytes of {entry[0]}"
    if len(entry) > 1 and checksum(path) != entry:
        return f"{name} has another content than was written: its checksum differs"
    return ""


def _checksums(found: Mapping[str, epath.Path]) -> dict[str, Checksum]:
    return dict(zip(found, _each(checksum, found.values()), strict=True))


def _each(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, values))
