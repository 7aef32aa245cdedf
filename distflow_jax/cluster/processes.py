"""Processes of one run: joining the job, checking agreement, exchanging small host data.

P processes. This is the only module that uses `jax.distributed`. Every function that gathers is
collective: all processes must call it, from the thread that issues JAX computations, in the same
order.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import ipaddress
import json
import logging
import os
import pathlib
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from distflow_jax.cluster.handshakes import open_listener
from distflow_jax.cluster.host_exchange import HostExchange, listen
from distflow_jax.cluster.job import ALONE, DISTRIBUTED, Job
from distflow_jax.cluster.mutual_tls import set_mutual_tls
from distflow_jax.cluster.startup import JOIN_SECONDS, Registrar, StartMonitor, register
from distflow_jax.parsing.addresses import Address, reserved_port

LATER_SECONDS = 30  # for jax to give up after this job has, which names whom it waits for
LEAVE_SECONDS = 1.0  # in which whoever started the processes sees the first end before the others
EXIT_LOST = 1
ADDRESS_BYTES = 128  # room for "host port token"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

# Limits on the disagreements that an error message shows.
SHOWN_KEYS = 5
SHOWN_SIDES = 4
SHOWN_CHARACTERS = 60

log = logging.getLogger("distflow_jax")


def initialize(job: Job, *, watched_next: bool = False) -> None:
    """Joins the other processes of the job, see job.find; does nothing for a single process.

    If one of them ends or stops meanwhile, this process names it and ends, or with `watched_next`
    until `met_others`. Call it before anything uses a device. Raises ValueError if jax is to detect
    the job and fails, for certificates that do not fit, and if the job does not admit this process;
    ConnectionError if process 0 is not there in time.
    """
    if job != ALONE:
        log.info(job.describe())
    if job.kind == "alone":
        return
    if set_mutual_tls():
        log.info("the coordination service of JAX has mutual TLS")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # This service would handle SIGTERM, on which a run saves a checkpoint and exits with code 75.
    jax.config.update("jax_enable_preemption_service", False)
    if job.coordinator is None:
        try:
            jax.distributed.initialize(cluster_detection_method=job.detection)
        except ValueError as error:  # no cluster found; the error names a missing argument
            raise ValueError(
                f"jax finds no cluster ({job.describe()}; {error}); name the job by --coordinator, "
                f"--num_processes and --process_id, or run alone with {DISTRIBUTED}=off"
            ) from error
    elif job.process_id == 0:
        listener = open_listener(job.coordinator)
        host = listener.getsockname()[0]
        if ipaddress.ip_address(host).is_unspecified:
            host = reachable_host(job)
        with reserved_port(host) as service:
            _joined.start = Registrar(job, _leave, listener, service)
            _join(job, service)
    else:
        service, connection = register(job)
        _joined.start = StartMonitor(job, _leave, connection)
        _join(job, service)
    if process_count() > 1:
        _joined.host = reachable_host(job)
        _joined.exchange = _connect_hosts(_joined.host)
    if not watched_next:
        met_others()


def met_others() -> None:
    """Ends this process's watch over the others' start: from here on somebody else watches them."""
    if _joined.start is not None:
        _joined.start.met()


def _leave(reason: str) -> None:
    """Ends this process, which cannot go on without another one."""
    log.error("%s; this process ends too", reason)
    for call in _joined.before_leaving:
        call()
    time.sleep(LEAVE_SECONDS)
    logging.shutdown()
    os._exit(EXIT_LOST)


def stop_others() -> None:
    """Has SIGTERM, which ends this process, end the others too while the job starts."""
    if _joined.start is not None:
        _joined.start.stopped()


def before_leaving(call: Callable[[], object]) -> None:
    """Has `call` called if this process ends because another one ended while the job started."""
    _joined.before_leaving.append(call)


def _join(job: Job, service: str) -> None:
    """Joins JAX's coordination service, which process 0 starts at `service`, HOST:PORT."""
    jax.distributed.initialize(
        service,
        job.num_processes,
        job.process_id,
        job.local_device_ids,
        # within a Slurm step jax would otherwise still select a single GPU
        cluster_detection_method="deactivate",
        initialization_timeout=int(JOIN_SECONDS) + LATER_SECONDS,
        # not on all interfaces, which is jax's default
        coordinator_bind_address=service,
    )


def _connect_hosts(host: str) -> HostExchange:
    """Gathers the addresses of all processes, the only host data exchanged through XLA."""
    listener = listen(host)
    port = listener.getsockname()[1]
    mine = np.zeros(ADDRESS_BYTES, np.uint8)
    text = f"{host} {port} {secrets.token_hex(16)}".encode()
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(mine))
    fields = [row.tobytes().rstrip(b"\0").decode().split(" ") for row in gathered]
    addresses = [(host, int(port)) for host, port, _ in fields]
    return HostExchange(process_index(), addresses, listener, bytes.fromhex(fields[0][2]))


def host_exchange() -> HostExchange | None:
    """Connections to the other processes; None in a run of one."""
    return _joined.exchange


def second_exchange() -> HostExchange | None:
    """Connections of their own to the other processes, for another thread; None in a run of one.

    Collective. The caller closes them.
    """
    if _joined.exchange is None:
        return None
    listener = listen(_joined.host)
    address = [_joined.host, listener.getsockname()[1], secrets.token_hex(16)]
    gathered = all_gather_json(address)
    addresses = [(host, port) for host, port, _ in gathered]
    token = bytes.fromhex(gathered[0][2])
    return HostExchange(process_index(), addresses, listener, token)


def shutdown() -> None:
    """Leaves the job after waiting for the other processes; does nothing for a single process."""
    if _joined.exchange is not None:
        _joined.exchange.close()
        _joined.exchange = None
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    if _joined.start is not None:
        _joined.start.close()
        _joined.start = None


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
    """Seconds that this process has spent in collectives among hosts, mostly waiting."""
    return _spent.waited


def coordination_cpu_seconds() -> float:
    """CPU seconds that this process has spent in collectives among hosts and in planning them."""
    return _spent.cpu


@dataclasses.dataclass
class _Joined:
    exchange: HostExchange | None = None
    host: str = ""  # address at which the others reach this process
    start: StartMonitor | None = None  # process 0's is a Registrar
    before_leaving: list[Callable[[], object]] = dataclasses.field(default_factory=list)


_joined = _Joined()


@dataclasses.dataclass
class _Spent:
    waited: float = 0.0
    cpu: float = 0.0
    depth: int = 0


_spent = _Spent()


def reachable_host(job: Job) -> str:
    """The address at which the job's other processes reach this host."""
    if job.kind == "alone":
        return "127.0.0.1"
    if job.coordinator is None:
        return socket.gethostbyname(socket.gethostname())
    # nothing is sent: connecting a datagram socket only looks up the route, and so the interface
    address = socket.getaddrinfo(*Address.parse(job.coordinator), type=socket.SOCK_DGRAM)[0]
    with socket.socket(address[0], socket.SOCK_DGRAM) as probe:
        probe.connect(address[4])
        return probe.getsockname()[0]


def all_gather_ints(array: np.ndarray) -> np.ndarray:
    """Gathers every process's array, stacked in the order of the processes: [...] -> [P, ...].

    Shape and dtype (any fixed-size NumPy type) must be equal on all processes.
    """
    return np.stack(all_gather_ragged(array))


def any_process(value: bool) -> bool:
    """Whether a value is true on any process. Collective."""
    return bool(all_gather_ints(np.int32(value)).any())


def all_gather_ragged(array: np.ndarray) -> list[np.ndarray]:
    """Gathers every process's array, in the order of the processes: [N, ...] -> P x [N_p, ...].

    The first dims may differ between processes; other dims and dtype must be equal.
    """
    array = np.asarray(array)
    if process_count() == 1:
        return [array.copy()]
    with communicating():
        gathered = _joined.exchange.all_gather(array.tobytes())
    width = max(1, int(np.prod(array.shape[1:])) * array.dtype.itemsize)
    return [
        np.frombuffer(data, array.dtype).reshape(
            (len(data) // width, *array.shape[1:]) if array.ndim else ()
        )
        for data in gathered
    ]


def barrier(name: str) -> None:
    """Waits until all processes have called it with the same name."""
    if process_count() > 1:
        with communicating():
            multihost_utils.sync_global_devices(name)


def all_gather_text(text: str) -> list[str]:
    """Gathers every process's text, in the order of the processes; also a barrier."""
    if process_count() == 1:
        return [text]
    with communicating():
        return [data.decode() for data in _joined.exchange.all_gather(text.encode())]


def gather_text(text: str) -> list[str]:
    """All processes' texts in process 0, in their order; [] elsewhere. Collective, but only process
    0 waits for the others."""
    if process_count() == 1:
        return [text]
    sources = () if process_index() else range(process_count())
    with communicating():
        received, _ = _joined.exchange.exchange({0: text.encode()}, sources)
    return [received[process].decode() for process in sources]


def all_gather_json(value: Any) -> list[Any]:
    """Gathers every process's JSON-serialisable value, in the order of the processes."""
    return [json.loads(text) for text in all_gather_text(json.dumps(value))]


# -- agreement --------------------------------------------------------------------------------


def check_agreement(tables: Mapping[str, Mapping[str, str]]) -> None:
    """Raises ValueError on all processes if they differ in any entry of the tables.

    `tables`: {name: {key: value}}, with names such as "config", "plan", "code", "files" and
    "versions". Only digests are exchanged, and the tables themselves where the digests differ. The
    error names the processes, keys and values.
    """
    digests = {name: _digest(table) for name, table in tables.items()}
    gathered = all_gather_json(digests)
    names = sorted({name for theirs in gathered for name in theirs})
    differing = [name for name in names if len({theirs.get(name) for theirs in gathered}) > 1]
    if not differing:
        return
    mine = {name: dict(tables.get(name, {})) for name in differing}
    theirs = all_gather_json(mine)
    lines = [describe_differences(name, [table[name] for table in theirs]) for name in differing]
    raise ValueError(
        f"processes differ in {'; '.join(lines)}. Start all of them with the same config, code and "
        "packages"
    )


def describe_differences(name: str, tables: Sequence[Mapping[str, str]]) -> str:
    """Lists the keys in which the processes' tables differ, with the values.

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
    # long values are shown from shortly before their first difference
    common = len(os.path.commonprefix([value for value in sides if value is not None]))
    start = max(0, common - SHOWN_CHARACTERS // 3)
    words = []
    for value, indices in list(sides.items())[:SHOWN_SIDES]:
        verb = "has" if len(indices) == 1 else "have"
        words.append(f"{_processes(indices)} {verb} {_excerpt(value, start)}")
    rest = [process for indices in list(sides.values())[SHOWN_SIDES:] for process in indices]
    if rest:
        words.append(f"{_processes(sorted(rest))} have other values")
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
    """{path: hash of its content} of every .py file below `folder` (default: this package)."""
    root = pathlib.Path(__file__).parents[1] if folder is None else pathlib.Path(folder)
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(root.rglob("*.py"))
    }


def version_table() -> dict[str, str]:
    """Versions of Python and of the packages on which the processes must agree."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version()} | versions
