"""The folder of compiled programs: where it is by default, and its care. Imports no jax.

By default it lies below the user's cache folder, one folder for each kind of processor: a program
compiled for one CPU may use instructions that another one lacks, and a home may be shared by both.
JAX writes entries in place, never repairs one and never removes any; hence each start drops entries
that a killed process has left incomplete, and the least recently used beyond MOST_BYTES.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import shutil
import time
import zlib

from distflow_jax.parsing.paths import cache_folder

VARIABLE = "JAX_COMPILATION_CACHE_DIR"  # JAX's own setting, which overrides compilation_cache
MOST_BYTES = 8 << 30  # of entries, at a run's start
LEAST_FREE = 64 << 20  # bytes of the disk, below which nothing is added
ENTRIES, _CHECKED = "*-cache", ".checked"  # JAX's files, and ours: entries older than it are whole
_PIECE = 1 << 20  # bytes that are decompressed at once
_ZSTANDARD = b"\x28\xb5\x2f\xfd"  # the first bytes of an entry where JAX has that package


def automatic_folder() -> pathlib.Path:
    """The user's own folder for this kind of processor. ValueError for a user without a home."""
    return cache_folder() / "programs" / _processor()


def prepare(folder: pathlib.Path) -> str:
    """Makes a folder ready; returns what keeps it from being used, "" for nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return "cannot be written to"
        clean(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    return f"has {free >> 20} MiB left on its disk" if free < LEAST_FREE else ""


def clean(folder: pathlib.Path, most_bytes: int | None = None) -> None:
    """Removes incomplete entries, and the least recently used beyond `most_bytes` (MOST_BYTES)."""
    checked, now = folder / _CHECKED, time.time_ns()
    since = checked.stat().st_mtime_ns if checked.exists() else 0
    kept = []
    for path in folder.glob(ENTRIES):
        with contextlib.suppress(FileNotFoundError):  # another start has removed it
            stat = path.stat()
            if stat.st_mtime_ns >= since and not _is_whole(path):
                path.unlink()
            else:
                kept.append((max(stat.st_atime_ns, stat.st_mtime_ns), stat.st_size, path))
    above = sum(size for _, size, _ in kept) - (MOST_BYTES if most_bytes is None else most_bytes)
    for _, size, path in sorted(kept):
        if above <= 0:
            break
        path.unlink(missing_ok=True)
        above -= size
    checked.touch()
    os.utime(checked, ns=(now, now))  # what others write meanwhile is looked at by the next start


def _is_whole(path: pathlib.Path) -> bool:
    """Whether an entry can be decompressed to its end; one in another format is believed."""
    unpack = zlib.decompressobj()
    with path.open("rb") as file:
        if file.read(len(_ZSTANDARD)) == _ZSTANDARD:
            return True
        file.seek(0)
        try:
            while piece := file.read(_PIECE):
                while piece:
                    unpack.decompress(piece, _PIECE)
                    piece = unpack.unconsumed_tail
        except zlib.error:
            return False
    return unpack.eof


def _processor() -> str:
    """The instruction set of this host, as the name of a folder: x86_64-1f2e3d4c."""
    with contextlib.suppress(OSError):  # only Linux has the file
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        names = ("model name", "flags", "Features", "CPU part")
        told = sorted({line for line in lines if line.split("\t")[0].strip() in names})
        return f"{platform.machine()}-{hashlib.sha256(repr(told).encode()).hexdigest()[:8]}"
    return f"{platform.machine()}-{platform.system().lower()}"
