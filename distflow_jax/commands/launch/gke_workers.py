"""Workers of a run on GKE: an indexed Job of its own, one pod per worker.

A JobSet that starts again recreates all of its jobs, so the workers are none of them.
"""

import argparse
from typing import Any

from distflow_jax.cluster import job
from distflow_jax.commands.launch import hosts
from distflow_jax.commands.launch.worker_group import add_worker_flags, worker_variables
from distflow_jax.planning.chips import CHIPS

LABEL = "distflow-run"  # of both groups: kubectl delete jobset,job,service -l distflow-run=NAME
MACHINE = "node.kubernetes.io/instance-type"
TLS_FOLDER = "/etc/distflow/tls"
_TLS_FILES = {
    "DISTFLOW_TLS_CERT": "tls.crt",
    "DISTFLOW_TLS_KEY": "tls.key",
    "DISTFLOW_TLS_CA": "ca.crt",
}
# --tpu -> label of the node pool
TPUS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
# chips of a slice of one host, by its topology
_ONE_HOST = {"1x1": 1, "2x2": 4, "2x4": 8, "2x2x1": 4}


def add_flags(parser: hosts.LauncherParser) -> None:
    """Adds the flags of the second group, and of certificates."""
    add_worker_flags(parser)
    add = parser.add_argument
    add("--worker_gpu", default="", help="GPU type of the workers (default: --gpu)")
    add("--worker_gpus", type=int, default=1, help="GPUs of each worker (default 1)")
    add("--worker_tpu", default="", help="TPU generation of the workers (default: --tpu)")
    add("--worker_topology", default="", help="chips of each worker's host: 1x1, 2x2, 2x4, 2x2x1")
    add("--worker_machine_type", default="", help="machine type, such as g2-standard-8")
    add("--worker_spot", action="store_true", help="use preemptible (spot) nodes for workers")
    add(
        "--worker_max_restarts",
        type=int,
        default=100,
        help="restarts of each worker after a crash, or without trainers (default 100)",
    )
    add(
        "--tls_secret",
        default="",
        metavar="NAME",
        help="a Secret with tls.crt, tls.key and ca.crt, for TLS between trainers and workers",
    )


def check_group(options: argparse.Namespace) -> None:
    """Raises ValueError for flags of workers that the cluster would refuse."""
    hosts.at_least(1, worker_gpus=options.worker_gpus)
    hosts.at_least(0, workers=options.workers, worker_max_restarts=options.worker_max_restarts)
    if options.tls_secret:
        hosts.name_of("--tls_secret", options.tls_secret)
    if not options.workers:
        return
    if options.worker_gpu and options.worker_tpu:
        raise ValueError("give either --worker_tpu and --worker_topology, or --worker_gpu")
    hosts.name_of("--name", options.name, length=63 - len(f"-workers-{options.workers - 1}-xxxxx"))
    for flag in ("worker_gpu", "worker_machine_type"):
        if name := getattr(options, flag):
            hosts.name_of(f"--{flag}", name)
    tpu = _tpu(options)
    if not tpu:
        return
    if tpu not in TPUS:
        raise ValueError(f"--worker_tpu must be one of {', '.join(sorted(TPUS))}, got {tpu!r}")
    dims = CHIPS[tpu].dims
    fit = [t for t in _ONE_HOST if t.count("x") == dims - 1]
    if options.worker_topology not in fit:
        raise ValueError(
            f"a worker is one host: --worker_topology of {tpu} must be one of {', '.join(fit)}, "
            f"got {options.worker_topology!r}"
        )


def tls_variables(options: argparse.Namespace) -> dict[str, str]:
    """Variables that name the files of --tls_secret; {} without it."""
    if not options.tls_secret:
        return {}
    return {name: f"{TLS_FOLDER}/{file}" for name, file in _TLS_FILES.items()}


def tpu_nodes(tpu: str, topology: str) -> dict[str, str]:
    """Labels of the nodes of a TPU slice."""
    return {
        "cloud.google.com/gke-tpu-accelerator": TPUS[tpu],
        "cloud.google.com/gke-tpu-topology": topology,
    }


def spot_nodes(spot: bool) -> dict[str, str]:
    """Labels of preemptible nodes, if they are to be."""
    return {"cloud.google.com/gke-spot": "true"} if spot else {}


def worker_group(options: argparse.Namespace) -> dict[str, Any]:
    """The workers of the template."""
    if tpu := _tpu(options):
        nodes = tpu_nodes(tpu, options.worker_topology)
        limits = {"google.com/tpu": _ONE_HOST[options.worker_topology]}
    else:
        nodes = {"cloud.google.com/gke-accelerator": options.worker_gpu or options.gpu}
        limits = {"nvidia.com/gpu": options.worker_gpus}
    if options.worker_machine_type:
        nodes[MACHINE] = options.worker_machine_type
    return {
        "command": [options.python, *options.worker],
        "env": _variables(options),
        "nodes": nodes | spot_nodes(options.worker_spot),
        "limits": limits,
        "host_network": False,
    }


def _tpu(options: argparse.Namespace) -> str:
    """The TPU generation of the workers, "" for GPUs."""
    return options.worker_tpu or ("" if options.worker_gpu else options.tpu or "")


def _variables(options: argparse.Namespace) -> dict[str, str]:
    tls = {n: path for n, path in tls_variables(options).items() if n == "DISTFLOW_TLS_CA"}
    return worker_variables(options, {job.GRACE: str(options.grace_seconds), **tls})
