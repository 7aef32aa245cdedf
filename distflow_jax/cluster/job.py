"""The job that a process belongs to, from its environment alone.

`find` maps environment variables (and the flags of the scripts) to a `Job`; cluster/processes.py
joins it. The first kind that applies is used, the most specific first:

    flags        --coordinator=HOST:PORT --num_processes=N --process_id=I
    environment  DISTFLOW_COORDINATOR, DISTFLOW_NUM_PROCESSES, DISTFLOW_PROCESS_ID
    kubernetes   the first two of these and JOB_COMPLETION_INDEX, which Kubernetes sets in the pods
                 of an indexed Job or a JobSet: a manifest needs two constants, and no process
                 queries the cluster's API (jax would, through the `kubernetes` package)
    open_mpi     OMPI_COMM_WORLD_SIZE above 1. Before Slurm, because under Slurm mpirun starts its
                 daemons as a step, whose variables the processes inherit
    slurm        SLURM_STEP_NUM_TASKS above 1: a task started by srun. The body of an sbatch
                 script, a shell of salloc and `srun --pty bash` run alone
    tpu          several hosts in TPU_WORKER_HOSTNAMES, or several slices: GKE sets them
    alone        one process

DISTFLOW_DISTRIBUTED=off means alone whatever else is set. DISTFLOW_DISTRIBUTED=auto leaves
detection to jax: for TPU VMs, whose hosts are listed only by the metadata server.

Under Slurm and Open MPI a process takes all devices of its host if it is the only one there, and
its share of them otherwise. jax's own detection would assign it a single GPU, and is therefore used
for TPUs only. DISTFLOW_COORDINATOR, or JAX_COORDINATOR_PORT alone, overrides the address there.
"""

import dataclasses
import re
from collections.abc import Mapping

from distflow_jax.parsing.addresses import checked_address

COORDINATOR = "DISTFLOW_COORDINATOR"  # host:port of process 0
NUM_PROCESSES = "DISTFLOW_NUM_PROCESSES"
PROCESS_ID = "DISTFLOW_PROCESS_ID"
DISTRIBUTED = "DISTFLOW_DISTRIBUTED"  # auto, off
POD_INDEX = "JOB_COMPLETION_INDEX"
PORT = "JAX_COORDINATOR_PORT"
GRACE = "DISTFLOW_GRACE_SECONDS"  # between SIGTERM and SIGKILL
LAUNCHED = "DISTFLOW_LAUNCHED"  # the command that started all processes of a job
TOKEN = "DISTFLOW_JOB_TOKEN"  # a secret that the processes of one job have in common
VARIABLES = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
FLAGS = ("--coordinator", "--num_processes", "--process_id")

COORDINATOR_PORT = 8476  # of process 0, where a launcher chooses it
# The last 4096 ports, above Linux's ephemeral range. jax derives the same.
FIRST_PORT = 61440


@dataclasses.dataclass(frozen=True)
class Job:
    """Arguments with which jax joins the job, and their origin."""

    kind: str  # "flags", "slurm", ...: see the module
    found: str  # origin, for the log
    coordinator: str | None = None  # host:port; None: jax detects it
    num_processes: int | None = None  # None: detected by jax
    process_id: int | None = None  # None: detected by jax
    local_device_ids: tuple[int, ...] | None = None  # this process's devices of the host; None: all
    detection: str | None = None  # jax's method; None: jax tries all of its methods
    # the processes of a job have the same; see cluster/startup.py
    token: str = dataclasses.field(default="", repr=False, compare=False)

    def describe(self) -> str:
        """One line for the log."""
        if self.kind == "alone":
            return f"job: one process, {self.found}"
        size = "several processes"
        if self.num_processes is not None:
            size = f"process {self.process_id} of {self.num_processes}"
        line = f"job: {size}, {self.found}, coordinator {self.coordinator or 'found by jax'}"
        if self.local_device_ids is not None:
            line += f", local devices {', '.join(map(str, self.local_device_ids))}"
        return line


ALONE = Job("alone", "no cluster in the environment", None, 1, 0)


def find(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Job:
    """The job of a process with this environment; the keyword arguments are the scripts' flags.

    Its token is that of DISTFLOW_JOB_TOKEN; without it a Slurm step's is its number, which keeps
    other jobs out, but nobody who can guess. Raises ValueError for settings that are incomplete,
    malformed, or contradict each other.
    """
    found = _find(environ, coordinator, num_processes, process_id)
    token = environ.get(TOKEN, "")
    if not token and found.kind == "slurm":
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        token = ".".join(environ.get(name, "") for name in names)
    return dataclasses.replace(found, token=token)


def _find(
    environ: Mapping[str, str],
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
) -> Job:
    values = (coordinator, num_processes, process_id)
    flags = {n: str(value) for n, value in zip(FLAGS, values, strict=True) if value is not None}
    named = {name: environ[name] for name in VARIABLES if environ.get(name)}
    mode = environ.get(DISTRIBUTED, "")
    if mode not in ("", "auto", "off"):
        raise ValueError(
            f"{DISTRIBUTED}={mode!r} is unknown; set it to 'auto' or 'off', or unset it"
        )
    if mode and (flags or (mode == "auto" and named)):
        name, text = next(iter((flags or named).items()))
        raise ValueError(f"{name}={text} names a job against {DISTRIBUTED}={mode}; drop one")
    if mode == "off":
        return dataclasses.replace(ALONE, found=f"{DISTRIBUTED}=off")
    if mode == "auto":
        return Job("auto", f"{DISTRIBUTED}=auto")
    if flags:
        return _named("flags", "named by flags", FLAGS, flags)
    if NUM_PROCESSES in named or PROCESS_ID in named:
        if PROCESS_ID not in named and environ.get(POD_INDEX):
            pod = environ.get("HOSTNAME", "of an indexed job")
            names = (COORDINATOR, NUM_PROCESSES, POD_INDEX)
            return _named("kubernetes", f"found in Kubernetes pod {pod}", names, environ)
        return _named("environment", f"named by {COORDINATOR}", VARIABLES, environ)
    job = _open_mpi(environ) or _slurm(environ)
    if job is None and named:  # a coordinator, and no launcher that gives size and index
        return _named("environment", f"named by {COORDINATOR}", VARIABLES, environ)
    job = job or _tpu(environ)
    if job is None and environ.get(POD_INDEX):
        # the manifest may have forgotten them, and each pod would train alone: the log says why
        found = f"as {COORDINATOR} and {NUM_PROCESSES} are not set with {POD_INDEX}"
        return dataclasses.replace(ALONE, found=found)
    return job or ALONE


def _named(kind: str, found: str, names: tuple[str, str, str], texts: Mapping[str, str]) -> Job:
    """A job whose address, size and index are all named explicitly."""
    missing = [name for name in names if not texts.get(name)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be set too: {', '.join(names)} describe a job together"
        )
    address, count, index = names
    return _job(kind, found, checked_address(address, texts[address]), texts, count, index)


def _job(
    kind: str,
    found: str,
    coordinator: str,
    texts: Mapping[str, str],
    count: str,
    index: str,
    local_device_ids: tuple[int, ...] | None = None,
) -> Job:
    """The job whose size is texts[count] and in which this process's index is texts[index]."""
    num_processes, process_id = _whole(count, texts[count]), _whole(index, texts[index])
    if not process_id < num_processes:
        raise ValueError(
            f"{index}={process_id} must be below {count}={num_processes} (ids count from 0)"
        )
    return Job(kind, found, coordinator, num_processes, process_id, local_device_ids)


# -- launchers --------------------------------------------------------------------------------


def _open_mpi(environ: Mapping[str, str]) -> Job | None:
    count, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    size, place = "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    if _whole(count, environ.get(count) or "1") == 1:
        return None
    _require(environ, "mpirun", rank, size, place)
    coordinator = _override(environ) or _mpirun_address(environ)
    devices = _share_of_host(environ, _whole(size, environ[size]), _whole(place, environ[place]))
    return _job("open_mpi", "found in Open MPI", coordinator, environ, count, rank, devices)


def _mpirun_address(environ: Mapping[str, str]) -> str:
    """The host of mpirun, which by default starts rank 0 on its own host.

    The variable reads "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"; its first number is the
    job's number times 4096.
    """
    name = "OMPI_MCA_orte_hnp_uri"
    text = environ.get(name, "")
    parts = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^],]+))", text)
    if parts is None:
        raise ValueError(
            f"the host of rank 0 is unknown ({name} is {repr(text) if text else 'unset'}, as in "
            f"Open MPI 5); set it with mpirun -x {COORDINATOR}=HOST:PORT"
        )
    number, v4, v6 = parts.groups()
    return f"{v4 or f'[{v6}]'}:{_port(environ, int(number) // 4096)}"


def _slurm(environ: Mapping[str, str]) -> Job | None:
    count, rank, number = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID"
    hosts, tasks = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    place, node = "SLURM_LOCALID", "SLURM_NODEID"
    if _whole(count, environ.get(count) or "1") == 1:
        return None
    _require(environ, "srun", rank, number, hosts, tasks, place, node)
    port = _port(environ, _whole(number, environ[number]))
    coordinator = _override(environ) or f"{first_host(environ[hosts])}:{port}"
    here = tasks_on_node(environ[tasks], _whole(node, environ[node]))
    devices = _share_of_host(environ, here, _whole(place, environ[place]))
    step = f"{environ[number]}.{environ.get('SLURM_STEP_ID', '?')}"
    return _job("slurm", f"found in Slurm step {step}", coordinator, environ, count, rank, devices)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: "tpu[007-010,12],login" -> "tpu007"."""
    first = re.match(r"(?:\[[^]]*\]|[^,[])+", nodelist)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodelist!r} names no host")
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0])


def tasks_on_node(counts: str, node: int) -> int:
    """Number of tasks on one node, from Slurm's notation: "2(x3),1" means 2, 2, 2, 1."""
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", counts):
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE must read like '2(x3),1', got {counts!r}")
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        node -= int(nodes or 1)
        if node < 0:
            return int(tasks)
    raise ValueError(f"SLURM_NODEID is beyond the nodes of SLURM_STEP_TASKS_PER_NODE={counts!r}")


def _share_of_host(
    environ: Mapping[str, str], processes: int, place: int
) -> tuple[int, ...] | None:
    """Indices of the visible devices that belong to process `place` of `processes` on this host.

    None (all visible devices) for a single process, or if the launcher has bound each process to
    its own devices.
    """
    name = "CUDA_VISIBLE_DEVICES"
    devices = len(environ[name].split(",")) if environ.get(name) else None
    bound = environ.get("SLURM_GPUS_PER_TASK") or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    if processes == 1 or bound or devices == 1:
        return None
    share, rest = divmod(processes if devices is None else devices, processes)
    if rest:
        raise ValueError(
            f"{processes} processes on one host cannot divide {name}={environ[name]!r}; start one "
            "process per host"
        )
    return tuple(range(place * share, (place + 1) * share))


def _tpu(environ: Mapping[str, str]) -> Job | None:
    """A pod of GKE. jax chooses the port, and waits until the coordinator's name resolves."""
    name = "TPU_PROCESS_ADDRESSES" if environ.get("TPU_PROCESS_ADDRESSES") else ""
    name = name or "TPU_WORKER_HOSTNAMES"
    index, slices, slice_id = "TPU_WORKER_ID", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"
    hosts = len(environ[name].split(",")) if environ.get(name) else 0
    num_slices = _whole(slices, environ.get(slices) or "1")
    if max(hosts, 1) * num_slices == 1:
        return None
    if not hosts:  # slices of TPU VMs: jax queries the metadata server for their hosts
        return Job("tpu", f"found in {slices}", detection="gcetpu")
    _require(environ, "GKE", index, *([slice_id] if num_slices > 1 else []))
    place, number = _whole(index, environ[index]), _whole(slice_id, environ.get(slice_id) or "0")
    if not (place < hosts and number < num_slices):
        raise ValueError(
            f"{index}={place} must be below the {hosts} hosts of {name}, and {slice_id}={number} "
            f"below {slices}={num_slices}"
        )
    return Job(
        "tpu",
        f"found in {name}",
        num_processes=hosts * num_slices,
        process_id=number * hosts + place,
        detection="gketpu",
    )


# -- values -----------------------------------------------------------------------------------


def _require(environ: Mapping[str, str], launcher: str, *names: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be set too, as {launcher} does; start the process with "
            f"{launcher}, or alone with {DISTRIBUTED}=off"
        )


def _override(environ: Mapping[str, str]) -> str | None:
    return checked_address(COORDINATOR, environ[COORDINATOR]) if environ.get(COORDINATOR) else None


def _port(environ: Mapping[str, str], number: int) -> int:
    """The coordinator's port, which all processes derive from the job's number."""
    return _whole(PORT, environ[PORT]) if environ.get(PORT) else FIRST_PORT + number % 4096


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    return int(text)
