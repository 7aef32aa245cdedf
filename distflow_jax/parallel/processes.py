"""Processes of one run: how they find each other, agree, and exchange small host data.

The only file that touches `jax.distributed`. Every function that gathers is collective: all
processes must call it, from the thread that issues JAX computations, in the same order.

P processes.
"""

import hashlib
import os
import pathlib
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

COORDINATOR = "DISTFLOW_COORDINATOR"  # host:port of process 0
NUM_PROCESSES = "DISTFLOW_NUM_PROCESSES"
PROCESS_ID = "DISTFLOW_PROCESS_ID"
DISTRIBUTED = "DISTFLOW_DISTRIBUTED"  # "auto": jax reads the cluster's own variables
# All host data travel in pieces of one size: another size would compile another program.
CHUNK_BYTES = 4096


def initialize_from_env(environ: Mapping[str, str] | None = None) -> None:
    """Joins the other processes if the environment names them; alone otherwise.

    DISTFLOW_COORDINATOR, DISTFLOW_NUM_PROCESSES and DISTFLOW_PROCESS_ID (set by
    scripts/launch_local.py) name a job explicitly. DISTFLOW_DISTRIBUTED=auto lets jax find the job
    from the cluster (TPU pods, Slurm, Open MPI, Kubernetes). Call it before anything uses a device.

    Raises ValueError for an incomplete or inconsistent set of variables.
    """
    environ = os.environ if environ is None else environ
    job = _explicit_job(environ)
    mode = environ.get(DISTRIBUTED, "")
    if mode not in ("", "auto"):
        raise ValueError(f"{DISTRIBUTED}={mode!r} is unknown; set it to 'auto' or unset it")
    if job is None and mode != "auto":
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # This service would take over SIGTERM, which a run answers with a checkpoint and exit code 75.
    jax.config.update("jax_enable_preemption_service", False)
    if job is None:
        jax.distributed.initialize()
        return
    coordinator, num_processes, process_id = job
    jax.distributed.initialize(coordinator, num_processes, process_id)


def _explicit_job(environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    missing = [name for name in names if not environ.get(name)]
    if len(missing) == len(names):
        return None
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be set too: {', '.join(names)} describe a job together"
        )
    coordinator = environ[COORDINATOR]
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{COORDINATOR} must be host:port, got {coordinator!r}")
    numbers = {}
    for name in names[1:]:
        if not environ[name].isdigit():
            raise ValueError(f"{name} must be a whole number, got {environ[name]!r}")
        numbers[name] = int(environ[name])
    num_processes, process_id = numbers[NUM_PROCESSES], numbers[PROCESS_ID]
    if not process_id < num_processes:
        raise ValueError(
            f"{PROCESS_ID}={process_id} must be below {NUM_PROCESSES}={num_processes} "
            "(ids count from 0)"
        )
    return coordinator, num_processes, process_id


def shutdown() -> None:
    """Leaves the job, waiting for the other processes; does nothing in a run of one process."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def process_index() -> int:
    """This process's number, 0 <= index < process_count()."""
    return jax.process_index()


def process_count() -> int:
    """Number of processes in the job, P."""
    return jax.process_count()


def all_gather_ints(array: np.ndarray) -> np.ndarray:
    """Every process's array, stacked in the order of the processes: [...] -> [P, ...].

    Shape and dtype (any fixed-size NumPy type) must be equal on all processes. The result is exact:
    64-bit values travel as bytes, because jax would cut them to 32 bits.
    """
    array = np.asarray(array)
    if process_count() == 1:
        return array[None].copy()
    data = np.frombuffer(array.tobytes(), np.uint8)
    gathered = np.empty((process_count(), data.size), np.uint8)
    for start in range(0, data.size, CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        chunk = np.zeros(CHUNK_BYTES, np.uint8)
        chunk[: part.size] = part
        parts = np.asarray(multihost_utils.process_allgather(chunk))
        gathered[:, start : start + CHUNK_BYTES] = parts[:, : part.size]
    shape = (process_count(), *array.shape)
    return np.frombuffer(gathered.tobytes(), array.dtype).reshape(shape)


def barrier(name: str) -> None:
    """Returns when all processes have called it with the same name."""
    if process_count() > 1:
        multihost_utils.sync_global_devices(name)


def all_gather_text(text: str) -> list[str]:
    """Every process's text, in the order of the processes. Lengths may differ. Also a barrier."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = all_gather_ints(np.array(data.size, np.int64))
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: data.size] = data
    rows = all_gather_ints(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def check_agreement(name_to_digest: Mapping[str, str]) -> None:
    """Raises a ValueError on all processes if they differ in any digest; says who and in what.

    `name_to_digest` maps what must agree ("config", "plan", "code") to a digest of it.
    """
    lines = sorted(f"{name}\t{digest}" for name, digest in name_to_digest.items())
    tables = [
        dict(line.split("\t", 1) for line in text.splitlines())
        for text in all_gather_text("\n".join(lines))
    ]
    differences = []
    for name in sorted({name for table in tables for name in table}):
        groups: dict[str, list[int]] = {}
        for index, table in enumerate(tables):
            groups.setdefault(table.get(name, "none"), []).append(index)
        if len(groups) > 1:
            sides = [f"{_processes(who)} {digest[:12]}" for digest, who in groups.items()]
            differences.append(f"{name}: {', '.join(sides)}")
    if differences:
        raise ValueError(
            f"processes differ in {'; '.join(differences)}. Start all of them with the same "
            "config and the same code"
        )


def _processes(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"process {indices[0]} has"
    return f"processes {', '.join(map(str, indices))} have"


def code_digest(folder: str | os.PathLike | None = None) -> str:
    """Hash of the names and contents of all .py files below `folder` (default: this package)."""
    root = pathlib.Path(__file__).parents[1] if folder is None else pathlib.Path(folder)
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
