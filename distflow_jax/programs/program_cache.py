"""The persistent cache of compiled programs, which makes every start but the first a short one.

By default it lies below the user's cache folder, one folder for each kind of processor: a program
compiled for one CPU may use instructions that another one lacks, and a home may be shared by both.
JAX writes entries in place, never repairs one and never removes any; hence each start drops entries
that a killed process has left incomplete, and the least recently used beyond MOST_BYTES.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import time
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from distflow_jax.parsing.paths import cache_folder, checked_path

AUTOMATIC = "auto"  # a folder below the user's cache folder
VARIABLE = "JAX_COMPILATION_CACHE_DIR"  # JAX's own setting, which overrides compilation_cache
MOST_BYTES = 8 << 30  # of entries, at a run's start
LEAST_FREE = 64 << 20  # bytes of the disk, below which nothing is added
# By default JAX keeps only programs that took a second to compile; many of a start take less.
_SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_ENTRIES, _CHECKED = "*-cache", ".checked"  # JAX's files, and ours: entries older than it are whole
_PIECE = 1 << 20  # bytes that are decompressed at once
_WARNING = "persistent compilation cache entry for"  # of JAX
_ZSTANDARD = b"\x28\xb5\x2f\xfd"  # the first bytes of an entry where JAX has that package

log = logging.getLogger("distflow_jax")


@contextlib.contextmanager
def kept_programs(folder: str) -> Iterator[None]:
    """Keeps compiled programs in `folder` and loads them from there; "" changes nothing.

    Programs for other shapes, options, devices or versions are separate entries. Several runs may
    share a folder. "auto" is the user's cache folder, or none where that cannot be written to; for
    any other folder that is a ValueError.
    """
    if chosen := os.environ.get(VARIABLE):
        if folder not in ("", AUTOMATIC, chosen):
            log.info("%s=%s overrides compilation_cache=%s", VARIABLE, chosen, folder)
        folder = ""
    where = _automatic() if folder == AUTOMATIC else _named(folder)
    if not where:
        yield
        return
    wanted = {"jax_compilation_cache_dir": where} | _SETTINGS
    before = {name: getattr(jax.config, name) for name in wanted}
    _configure(wanted)
    try:
        with _one_warning():
            yield
    finally:
        _configure(before)


def _named(folder: str) -> str:
    """The path of a folder that the user chose; a bucket's is JAX's to read."""
    if not folder or "://" in folder:
        return folder
    path = checked_path("new_folder", "compilation_cache", folder).resolve()
    if problem := _prepare(path):
        raise ValueError(f"compilation_cache={folder} {problem}; choose another folder")
    return str(path)


def _automatic() -> str:
    """The user's own folder for this kind of processor; "" where there can be none."""
    try:
        path = cache_folder() / "programs" / _processor()
    except ValueError as error:  # a user without a home, as in containers
        log.info("no compiled programs are kept: %s", error)
        return ""
    if problem := _prepare(path):
        log.info("no compiled programs are kept: %s %s (compilation_cache=FOLDER)", path, problem)
        return ""
    return str(path.absolute())


def _prepare(folder: pathlib.Path) -> str:
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
    for path in folder.glob(_ENTRIES):
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


def _configure(settings: dict) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # without a reset JAX keeps the settings of the process's first program; it logs every reset
    logging.getLogger("jax._src.compilation_cache").setLevel(logging.WARNING)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def _one_warning() -> Iterator[None]:
    """JAX warns of each program that it cannot write or read: the first one stands for all."""
    before, said = warnings.showwarning, []

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        if _WARNING not in str(message):
            before(message, *place, **more)
        elif not said:
            said.append(message)
            log.warning("the compilation cache misses programs: %s", message)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
