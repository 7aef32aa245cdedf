"""Memory, disks, caches, ports and limits of this host."""

import contextlib
import os
import pathlib
import pwd
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping

from distflow_jax.cluster.job import COORDINATOR_PORT
from distflow_jax.commands.doctor.finding import NOTE, OK, PROBLEM, Finding
from distflow_jax.commands.subcommands import SERVE
from distflow_jax.parsing.addresses import listen
from distflow_jax.parsing.paths import cache_folder, check_program_bucket
from distflow_jax.programs.program_folder import ENTRIES, LEAST_FREE, VARIABLE, automatic_folder
from distflow_jax.programs.units import format_bytes

LEAST_MEMORY = 4 << 30  # bytes: the default model with its moments
LEAST_DISK = 10 << 30  # bytes: two checkpoints of a model of 0.5B parameters
LEAST_FILES = 1024  # of a process: connections, data files and checkpoints
LOOPBACK = "127.0.0.1"
PORTS = {  # by default: what listens there
    next(flag.default for flag in SERVE.flags if flag.name == "port"): "distflow serve",
    COORDINATOR_PORT: "process 0 by launch gke",
}
_PREFIXES = ("JAX_", "XLA_", "DISTFLOW_", "TPU_", "LIBTPU_", "CUDA_VISIBLE", "NCCL_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def host_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The findings about this host; `environ` are the variables of this process."""
    yield memory_finding(*host_memory())
    yield disk_finding("disk", pathlib.Path.cwd(), "choose a --workdir elsewhere")
    yield from cache_findings()
    yield program_finding(environ)
    yield from port_findings(PORTS)
    yield file_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))
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
        owner = owner_of(folder)
    except OSError as error:
        return Finding(NOTE, name, f"{folder}{by} is not readable ({error.strerror})", fix)
    text = f"{folder}{by}, {len(sizes)} programs, {format_bytes(sum(sizes))}, owned by {owner}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(NOTE, name, f"{text}, not writable", fix)
    return Finding(OK, name, text)


def owner_of(path: pathlib.Path) -> str:
    """The user to whom a file or folder belongs."""
    number = path.stat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # a user of another host, or of a container's
        return f"user {number}"


def port_findings(ports: Mapping[int, str]) -> Iterator[Finding]:
    """Whether this host can listen on its loopback interface, and at the default ports."""
    try:
        listen("loopback", LOOPBACK, 0).close()
    except ValueError as error:
        fix = "allow sockets in this container: reward processes and workers use them"
        yield Finding(PROBLEM, "ports", str(error), fix)
        return
    used = {}
    for port, use in ports.items():
        try:
            listen(use, LOOPBACK, port).close()
        except ValueError:
            used[port] = use
    free = [f"{port} ({use})" for port, use in ports.items() if port not in used]
    yield Finding(
        OK, "ports", ", ".join([f"{LOOPBACK} is available", *(f"{x} free" for x in free)])
    )
    for port, use in used.items():
        fix = "choose another port at its start, or stop the process that uses it"
        yield Finding(NOTE, "ports", f"{port} ({use}) is in use", fix)


def file_finding(soft: int, hard: int) -> Finding:
    """The limit of open files, which a run raises to `hard`."""
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    text = f"{soft}, which a run may raise to {most}"
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        return Finding(NOTE, "open files", text, f"ulimit -Hn {LEAST_FILES}, as root")
    return Finding(OK, "open files", text)


def variables(environ: Mapping[str, str]) -> str:
    """The variables that change how JAX and this package run, without secrets."""
    found = {name: value for name, value in sorted(environ.items()) if name.startswith(_PREFIXES)}
    hidden = {name for name in found if any(word in name for word in _SECRET)}
    return " ".join(f"{n}={'...' if n in hidden else v}" for n, v in found.items())
