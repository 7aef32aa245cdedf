"""Processes of one run: how they find each other, agree, and exchange small host data.

The only file that touches `jax.distributed`. Every function that gathers is collective: all
processes must call it, from the thread that issues JAX computations, in the same order.

P processes.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from distflow_jax.parallel.host_exchange import Peers, listen
from distflow_jax.parallel.job import ALONE, DISTRIBUTED, Job

ADDRESS_BYTES = 128  # room for "host port token"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

# How much of a disagreement an error shows.
SHOWN_KEYS = 5
SHOWN_SIDES = 4
SHOWN_CHARACTERS = 60

log = logging.getLogger("distflow_jax")


def initialize(job: Job) -> None:
    """Joins the other processes of the job (job.find tells which it is); nothing to do if alone.

    Call it before anything uses a device. Raises ValueError if jax is to find the job and does not.
    """
    if job != ALONE:
        log.info(job.describe())
    if job.kind == "alone":
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # This service would take over SIGTERM, which a run answers with a checkpoint and exit code 75.
    jax.config.update("jax_enable_preemption_service", False)
    if job.coordinator is None:
        try:
            jax.distributed.initialize(cluster_detection_method=job.detection)
        except ValueError as error:  # it found no cluster, and says which argument it then lacks
            raise ValueError(
                f"jax finds no cluster ({job.describe()}; {error}); name the job by --coordinator, "
                f"--num_processes and --process_id, or run alone with {DISTRIBUTED}=off"
            ) from error
    else:
        jax.distributed.initialize(
            job.coordinator,
            job.num_processes,
            job.process_id,
            job.local_device_ids,
            # or, within a Slurm step, jax would still choose one GPU for us
            cluster_detection_method="deactivate",
        )
    if process_count() > 1:
        _joined.peers = _meet(reachable_host(job))


def _meet(host: str) -> Peers:
    """Tells the other processes where this one listens, by the one gather that XLA does for us."""
    listener = listen(host)
    port = listener.getsockname()[1]
    mine = np.zeros(ADDRESS_BYTES, np.uint8)
    text = f"{host} {port} {secrets.token_hex(16)}".encode()
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    told = np.asarray(multihost_utils.process_allgather(mine))
    parts = [row.tobytes().rstrip(b"\0").decode().split(" ") for row in told]
    addresses = [(host, int(port)) for host, port, _ in parts]
    return Peers(process_index(), addresses, listener, bytes.fromhex(parts[0][2]))


def peers() -> Peers | None:
    """Connections to the other processes; None in a run of one."""
    return _joined.peers


def shutdown() -> None:
    """Leaves the job, waiting for the other processes; does nothing in a run of one process."""
    if _joined.peers is not None:
        _joined.peers.close()
        _joined.peers = None
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def process_index() -> int:
    """This process's number, 0 <= index < process_count()."""
    return jax.process_index()


def process_count() -> int:
    """Number of processes in the job, P."""
    return jax.process_count()


@contextlib.contextmanager
def communicating() -> Iterator[None]:
    """Counts the time of its body as communication among hosts."""
    start = time.perf_counter()
    with coordinating():
        try:
            yield
        finally:
            _spent.waited += time.perf_counter() - start


@contextlib.contextmanager
def coordinating() -> Iterator[None]:
    """Counts the CPU time of its body, of all threads, as coordination. May be nested."""
    outermost, _spent.depth = not _spent.depth, _spent.depth + 1
    start = time.process_time()
    try:
        yield
    finally:
        _spent.depth -= 1
        if outermost:
            _spent.cpu += time.process_time() - start


def communication_seconds() -> float:
    """Time this process has spent in collectives among hosts, most of it waiting for others."""
    return _spent.waited


def coordination_cpu_seconds() -> float:
    """CPU time this process has spent in these collectives and in deciding what goes where."""
    return _spent.cpu


@dataclasses.dataclass
class _Joined:
    peers: Peers | None = None


_joined = _Joined()


@dataclasses.dataclass
class _Spent:
    waited: float = 0.0
    cpu: float = 0.0
    depth: int = 0


_spent = _Spent()


def reachable_host(job: Job) -> str:
    """Address of this host at which the job's other processes reach it."""
    if job.kind == "alone":
        return "127.0.0.1"
    if job.coordinator is None:
        return socket.gethostbyname(socket.gethostname())
    host, _, port = job.coordinator.rpartition(":")
    # nothing is sent: a datagram socket only looks up the way, and so the interface
    address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(address[0], socket.SOCK_DGRAM) as probe:
        probe.connect(address[4])
        return probe.getsockname()[0]


def all_gather_ints(array: np.ndarray) -> np.ndarray:
    """Every process's array, stacked in the order of the processes: [...] -> [P, ...].

    Shape and dtype (any fixed-size NumPy type) must be equal on all processes.
    """
    return np.stack(all_gather_ragged(array))


def all_gather_ragged(array: np.ndarray) -> list[np.ndarray]:
    """Every process's array, in the order of the processes. First dims may differ."""
    array = np.asarray(array)
    if process_count() == 1:
        return [array.copy()]
    with communicating():
        parts = _joined.peers.all_gather(array.tobytes())
    width = max(1, int(np.prod(array.shape[1:])) * array.dtype.itemsize)
    return [
        np.frombuffer(part, array.dtype).reshape(
            (len(part) // width, *array.shape[1:]) if array.ndim else ()
        )
        for part in parts
    ]


def barrier(name: str) -> None:
    """Returns when all processes have called it with the same name."""
    if process_count() > 1:
        with communicating():
            multihost_utils.sync_global_devices(name)


def all_gather_text(text: str) -> list[str]:
    """Every process's text, in the order of the processes. Lengths may differ. Also a barrier."""
    if process_count() == 1:
        return [text]
    with communicating():
        return [part.decode() for part in _joined.peers.all_gather(text.encode())]


def all_gather_json(value: Any) -> list[Any]:
    """Every process's value, made of what JSON can hold, in the order of the processes."""
    return [json.loads(text) for text in all_gather_text(json.dumps(value))]


# -- agreement --------------------------------------------------------------------------------


def check_agreement(tables: Mapping[str, Mapping[str, str]]) -> None:
    """Raises a ValueError on all processes if they differ in any entry; says who, in what.

    `tables` maps what must agree ("config", "plan", "code", "versions") to {key: value}. Digests
    are exchanged; only where these differ do the tables themselves travel.
    """
    digests = {name: _digest(table) for name, table in tables.items()}
    gathered = all_gather_json(digests)
    names = sorted({name for theirs in gathered for name in theirs})
    differing = [name for name in names if len({theirs.get(name) for theirs in gathered}) > 1]
    if not differing:
        return
    mine = {name: dict(tables.get(name, {})) for name in differing}
    theirs = all_gather_json(mine)
    parts = [describe_differences(name, [table[name] for table in theirs]) for name in differing]
    raise ValueError(
        f"processes differ in {'; '.join(parts)}. Start all of them with the same config, code and "
        "packages"
    )


def describe_differences(name: str, tables: Sequence[Mapping[str, str]]) -> str:
    """The keys in which the processes' tables differ, with each side's value.

    >>> describe_differences("config", [{"lr": "1"}, {"lr": "2"}, {"lr": "2"}])
    'config lr: process 0 has 1, processes 1-2 have 2'
    """
    lines = []
    for key in sorted({key for table in tables for key in table}):
        sides: dict[str | None, list[int]] = {}  # value -> processes
        for process, table in enumerate(tables):
            sides.setdefault(table.get(key), []).append(process)
        if len(sides) > 1:
            lines.append(f"{name} {key}: {_describe_sides(sides)}")
    if len(lines) > SHOWN_KEYS:
        lines[SHOWN_KEYS:] = [f"{name} and {len(lines) - SHOWN_KEYS} more"]
    return "; ".join(lines)


def _describe_sides(sides: Mapping[str | None, Sequence[int]]) -> str:
    # long values are shown from shortly before the place where they part
    common = len(os.path.commonprefix([value for value in sides if value is not None]))
    start = max(0, common - SHOWN_CHARACTERS // 3)
    words = []
    for value, who in list(sides.items())[:SHOWN_SIDES]:
        verb = "has" if len(who) == 1 else "have"
        words.append(f"{_processes(who)} {verb} {_excerpt(value, start)}")
    rest = [process for who in list(sides.values())[SHOWN_SIDES:] for process in who]
    if rest:
        words.append(f"{_processes(sorted(rest))} differ again")
    return ", ".join(words)


def _excerpt(value: str | None, start: int) -> str:
    if value is None:
        return "none"
    if len(value) <= SHOWN_CHARACTERS:
        return value
    shown = value[start : start + SHOWN_CHARACTERS]
    tail = "..." if start + SHOWN_CHARACTERS < len(value) else ""
    return ("..." if start else "") + shown + tail


def _processes(indices: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "processes 0-2, 5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    words = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(words)}"


def _digest(table: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def code_table(folder: str | os.PathLike | None = None) -> dict[str, str]:
    """Every .py file below `folder` (default: this package) with a hash of its content."""
    root = pathlib.Path(__file__).parents[1] if folder is None else pathlib.Path(folder)
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(root.rglob("*.py"))
    }


def version_table() -> dict[str, str]:
    """Versions of Python and of the packages whose programs or files the processes share."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version()} | versions
