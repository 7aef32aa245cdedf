"""Memory, disks and caches of this host."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping

from distflow_jax.commands.doctor.finding import NOTE, OK, PROBLEM, Finding
from distflow_jax.parsing.paths import cache_folder, check_program_bucket
from distflow_jax.programs.program_folder import ENTRIES, LEAST_FREE, VARIABLE, automatic_folder
from distflow_jax.programs.units import format_bytes
from distflow_jax.report.sections.redaction import redacted

LEAST_MEMORY = 4 << 30  # bytes: the default model with its moments
LEAST_DISK = 10 << 30  # bytes: two checkpoints of a model of 0.5B parameters
_PREFIXES = ("JAX_", "XLA_", "DISTFLOW_", "TPU_", "LIBTPU_", "CUDA_VISIBLE", "NCCL_")


def host_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The findings about this host; `environ` are the variables of this process."""
    yield memory_finding(*host_memory())
    yield disk_finding("disk", pathlib.Path.cwd(), "choose a --workdir elsewhere")
    yield from cache_findings()
    yield program_finding(environ)
    if set_here := variables(environ):
        yield Finding(OK, "variables", set_here)


def host_memory() -> tuple[int, int]:
    """(bytes that processes here can have, those available now; 0 if unknown)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = 0
    with contextlib.suppress(OSError):  # only Linux has the file
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # of a container
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(pathlib.Path("/sys/fs/cgroup", file).read_text()))
    return total, min(free, total)


def memory_finding(total: int, free: int) -> Finding:
    """The memory of the host, in bytes."""
    text = format_bytes(total) + (f", {format_bytes(free)} available" if free else "")
    if 0 < free < LEAST_MEMORY:
        fix = f"stop other programs: the default model needs {format_bytes(LEAST_MEMORY)}"
        return Finding(NOTE, "memory", text, fix)
    return Finding(OK, "memory", text)


def disk_finding(name: str, folder: pathlib.Path, fix: str) -> Finding:
    """Room on the disk of a folder, and whether this user can write there; `fix` if not."""
    place = folder
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
        free = shutil.disk_usage(place).free
    except OSError as error:
        text = f"{folder} is not writable ({error.strerror})"
        return Finding(NOTE, name, text, fix)
    text = f"{folder}, {format_bytes(free)} free"
    if free < LEAST_FREE:
        return Finding(PROBLEM, name, text, "free disk space: a run cannot write its files")
    if free < LEAST_DISK:
        return Finding(NOTE, name, text, "two checkpoints of 0.5B parameters take 10 GiB")
    return Finding(OK, name, text)


def cache_findings() -> Iterator[Finding]:
    """The user's home and cache folder, where models and compiled programs are kept."""
    fix = "set DISTFLOW_CACHE and HF_HOME to folders that you can write to"
    try:
        home, cache = pathlib.Path.home(), cache_folder()
    except (RuntimeError, ValueError) as error:  # a user without a home, as in containers
        yield Finding(NOTE, "home", str(error), fix)
        return
    if not os.access(home, os.W_OK | os.X_OK):
        yield Finding(NOTE, "home", f"{home} is not writable", fix)
    else:
        yield Finding(OK, "home", f"{home} is writable")
    yield disk_finding("cache", cache, fix)


def program_finding(environ: Mapping[str, str]) -> Finding:
    """The folder of compiled programs, which makes later starts short."""
    name, chosen = "programs", environ.get(VARIABLE, "")
    try:
        if "://" in chosen:
            check_program_bucket(VARIABLE, chosen)
            return Finding(OK, name, f"{chosen} ({VARIABLE}), which JAX accesses directly")
        folder = pathlib.Path(chosen) if chosen else automatic_folder()
    except ValueError as error:
        return Finding(
            NOTE, name, f"compiled programs are not kept: {error}", "choose a folder that you own"
        )
    by = f" ({VARIABLE})" if chosen else ""
    fix = "set compilation_cache to a folder that you own; without it, every start compiles again"
    try:
        if not folder.exists():
            return Finding(OK, name, f"{folder}{by} does not exist yet")
        sizes = [entry.stat().st_size for entry in folder.glob(ENTRIES)]
    except OSError as error:
        return Finding(NOTE, name, f"{folder}{by} is not readable ({error.strerror})", fix)
    text = f"{folder}{by}, {len(sizes)} programs, {format_bytes(sum(sizes))}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(NOTE, name, f"{text}, not writable", fix)
    return Finding(OK, name, text)


def variables(environ: Mapping[str, str]) -> str:
    """The variables that change how JAX and this package run, without secrets."""
    found = [(name, x) for name, x in sorted(environ.items()) if name.startswith(_PREFIXES)]
    return " ".join(f"{name}={redacted(name, value)}" for name, value in found)
