"""Checksums of a checkpoint's files, which find damage that leaves a file's size as it was.

    FOLDER/STEP/checksums.json   {file: [bytes, CRC-32 of each 64 MiB]}, written before the
                                 checkpoint has its name
    FOLDER/STEP/sizes.json       {file: bytes}, in checkpoints of older versions

TensorStore's OCDBT format keeps checksums of its index nodes, none of the arrays' values. A CRC-32
(ITU-T V.42, as in zlib) finds every error of a single burst of up to 32 bits, and others but for
one in 4e9. Each process reads back the files that it wrote, from the system's cache, and verifies
its share of all files before a restore. TensorStore writes few files, of gigabytes; their segments
are read by several threads.
"""

import hashlib
import json
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from etils import epath

FILE = "checksums.json"
SIZES_FILE = "sizes.json"
Checksum = list[int]  # [bytes, CRC-32 of each segment]
_SEGMENT = 1 << 26  # bytes
_BLOCK = 1 << 18  # bytes read at once: they stay in a core's cache
_THREADS = 4  # zlib and reads release the interpreter's lock


def write_part(folder: epath.Path, index: int) -> None:
    """Writes the checksums of the files below `folder`, all of which process `index` wrote."""
    found = {path.relative_to(folder).as_posix(): path for path in files(folder)}
    _part(folder, index).write_text(json.dumps(of_files(found)))


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
    table = {name: known[name] for name in names if name in known} | of_files(others)
    (checkpoint / FILE).write_text(json.dumps(table, indent=0))


def damage(
    checkpoint: epath.Path,
    index: int = 0,
    count: int = 1,
    more: Mapping[str, Checksum] = types.MappingProxyType({}),
) -> str:
    """One damaged file of those that process `index` of `count` verifies; "" if none is.

    Every file belongs to one process. Of a checkpoint without checksums the sizes are compared.
    `more`: checksums of files that were added to it.
    """
    table, failure = _table(checkpoint)
    if failure:
        return failure
    table |= more
    mine = sorted(table, key=lambda name: (-table[name][0], name))[index::count]
    return _wrong(checkpoint, {name: table[name] for name in mine}, has_checksums(checkpoint))


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
    content = {name: entry for name, entry in table.items() if name.startswith(f"{item}/")}
    return _wrong(checkpoint, table, False) or _wrong(
        checkpoint, content, has_checksums(checkpoint)
    )


def files(folder: epath.Path) -> Iterator[epath.Path]:
    """All files below a folder, sorted."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def _part(folder: epath.Path, index: int) -> epath.Path:
    return folder.parent / f"checksums.{index}.json"


def _table(checkpoint: epath.Path) -> tuple[dict[str, Checksum], str]:
    """({file: [bytes, CRC-32s] or [bytes]}, "") of a checkpoint, or ({}, why it has none)."""
    return read_table(checkpoint / (FILE if has_checksums(checkpoint) else SIZES_FILE))


def read_table(path: epath.Path) -> tuple[dict[str, Checksum], str]:
    """({file: [bytes, CRC-32s] or [bytes]}, "") of a table's file, or ({}, why it has none)."""
    name = path.name
    try:
        table = json.loads(path.read_text())
        if name == SIZES_FILE:
            table = {file: [size] for file, size in table.items()}
        for file, entry in table.items():
            integers = all(type(number) is int for number in entry)
            length = 1 if name == SIZES_FILE or not integers else 1 + len(_segments(entry[0]))
            if not integers or len(entry) != length:
                return {}, f"{name} has no checksum of {file}"
    except (OSError, ValueError, AttributeError, TypeError, LookupError, RecursionError) as error:
        return {}, f"{name}: {type(error).__name__}"
    return table, ""


def _wrong(checkpoint: epath.Path, table: Mapping[str, Checksum], content: bool) -> str:
    """The damage of a file in words, of its size or of its `content` too; "" if there is none."""
    for name, entry in table.items():
        path = checkpoint / name
        if not path.exists():
            return f"{name} is missing"
        if (size := path.stat().length) != entry[0]:
            return f"{name} has {size} bytes of {entry[0]}"
    if content:
        found = of_files({name: checkpoint / name for name in table})
        for name, entry in table.items():
            if found[name] != entry:
                return f"{name} has another content than was written: its checksum differs"
    return ""


def of_files(found: Mapping[str, epath.Path]) -> dict[str, Checksum]:
    """[bytes, CRC-32 of each segment] of files by name."""
    table = {name: [path.stat().length] for name, path in found.items()}
    places = [(name, start) for name, (size,) in table.items() for start in _segments(size)]
    with ThreadPoolExecutor(_THREADS) as pool:
        values = pool.map(lambda place: _crc(found[place[0]], place[1]), places)
        for (name, _), value in zip(places, values, strict=True):
            table[name].append(value)
    return table


def _segments(size: int) -> range:
    return range(0, size, _SEGMENT)


def _crc(path: epath.Path, start: int) -> int:
    """CRC-32 of the segment that begins at byte `start`."""
    crc, left, block = 0, _SEGMENT, memoryview(bytearray(_BLOCK))
    with path.open("rb") as file:
        file.seek(start)
        while left and (count := file.readinto(block)):
            crc, left = zlib.crc32(block[:count], crc), left - count
    return crc
