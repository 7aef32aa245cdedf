"""Workers of a run on GKE: an indexed Job of its own, one pod per worker.

A JobSet that starts again recreates all of its jobs, so the workers are none of them.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from distflow_jax.commands.launch import hosts
from distflow_jax.commands.launch.worker_group import add_worker_flags, worker_variables
from distflow_jax.config.user_error import EXIT_USAGE
from distflow_jax.parallel import job

LABEL = "distflow-run"  # of both groups: kubectl delete jobset,job,service -l distflow-run=NAME
MACHINE = "node.kubernetes.io/instance-type"
TLS_FOLDER = "/etc/distflow/tls"
_TLS_FILES = {
    "DISTFLOW_TLS_CERT": "tls.crt",
    "DISTFLOW_TLS_KEY": "tls.key",
    "DISTFLOW_TLS_CA": "ca.crt",
}
# --tpu -> (label of the node pool, dims of a topology)
TPUS = {
    "v4": ("tpu-v4-podslice", 3),
    "v5e": ("tpu-v5-lite-podslice", 2),
    "v5p": ("tpu-v5p-slice", 3),
    "v6e": ("tpu-v6e-slice", 2),
    "tpu7x": ("tpu7x", 3),
}
# chips of a slice of one host, by its topology
_ONE_HOST = {"1x1": 1, "2x2": 4, "2x4": 8, "2x2x1": 4}


def add_flags(parser: argparse.ArgumentParser) -> None:
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
        help="a Secret with tls.crt, tls.key and ca.crt, by which trainers and workers encrypt",
    )


def check_group(options: argparse.Namespace) -> None:
    """Raises ValueError for flags of workers that the cluster would refuse."""
    hosts.at_least(1, worker_gpus=options.worker_gpus)
    hosts.at_least(0, workers=options.workers, worker_max_restarts=options.worker_max_restarts)
    if options.tls_secret:
        hosts.name_of("--tls_secret", options.tls_secret, length=63)
    if not options.workers:
        return
    if options.worker_gpu and options.worker_tpu:
        raise ValueError("give either --worker_tpu and --worker_topology, or --worker_gpu")
    hosts.name_of("--name", options.name, length=63 - len(f"-workers-{options.workers - 1}-xxxxx"))
    if options.worker_gpu:
        hosts.name_of("--worker_gpu", options.worker_gpu, length=63)
    if options.worker_machine_type:
        hosts.name_of("--worker_machine_type", options.worker_machine_type, length=63)
    tpu = _tpu(options)
    if not tpu:
        return
    if tpu not in TPUS:
        raise ValueError(f"--worker_tpu must be one of {', '.join(sorted(TPUS))}, got {tpu!r}")
    dims = TPUS[tpu][1]
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


def mount_tls(
    options: argparse.Namespace, pod: dict[str, Any], files: list[str] | None = None
) -> None:
    """Has a pod's container see --tls_secret, where it is given; `files`: only these of it."""
    if not options.tls_secret:
        return
    secret: dict[str, Any] = {"secretName": options.tls_secret}
    if files is not None:
        secret["items"] = [{"key": file, "path": file} for file in files]
    pod["volumes"].append({"name": "tls", "secret": secret})
    mount = {"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True}
    pod["containers"][0]["volumeMounts"].append(mount)


def program(
    options: argparse.Namespace,
    command: list[str],
    variables: Mapping[str, str],
    limits: Mapping[str, int],
) -> dict[str, Any]:
    """Entries of a container: the interpreter with `command`, its variables and accelerators."""

    def verbatim(text: str) -> str:  # Kubernetes replaces $(NAME) by a variable's value
        return text.replace("$(", "$$(")

    return {
        "command": [verbatim(word) for word in (options.python, *command)],
        "env": [{"name": name, "value": verbatim(value)} for name, value in variables.items()],
        "resources": {"limits": limits},
    }


def worker_parts(options: argparse.Namespace, template: dict[str, Any]) -> list[dict[str, Any]]:
    """The manifests of the group: its Job.

    `template`: a pod of the trainers' group, without nodes, command and variables.
    """
    nodes, resources = _place(options)
    own = program(options, options.worker, _variables(options), resources)
    container = template["containers"][0] | own
    pod = template | {"nodeSelector": nodes, "containers": [container]}
    mount_tls(options, pod, ["ca.crt"])
    user_error = {"containerName": "main", "operator": "In", "values": [EXIT_USAGE]}
    gone = [{"type": "DisruptionTarget"}]
    labels = {LABEL: options.name}
    group = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": f"{options.name}-workers",
            "namespace": options.namespace,
            "labels": labels,
        },
        "spec": {
            "parallelism": options.workers,
            "completions": options.workers,
            "completionMode": "Indexed",
            # each worker by itself: the others go on
            "backoffLimitPerIndex": options.worker_max_restarts,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": user_error},
                    {"action": "Ignore", "onPodConditions": gone},
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return [group]


def worker_hosts(options: argparse.Namespace) -> list[hosts.Host]:
    """The workers' pods, with the variables that Kubernetes adds to those of the manifest."""
    command = [options.python, *options.worker]
    return [
        hosts.Host(
            f"{options.name}-workers-{i}",
            _variables(options) | {"JOB_COMPLETION_INDEX": str(i)},
            command,
        )
        for i in range(options.workers)
    ]


def _place(options: argparse.Namespace) -> tuple[dict[str, str], dict[str, int]]:
    """(labels of the nodes, limits of the container)."""
    if tpu := _tpu(options):
        nodes = {
            "cloud.google.com/gke-tpu-accelerator": TPUS[tpu][0],
            "cloud.google.com/gke-tpu-topology": options.worker_topology,
        }
        resources = {"google.com/tpu": _ONE_HOST[options.worker_topology]}
    else:
        nodes = {"cloud.google.com/gke-accelerator": options.worker_gpu or options.gpu}
        resources = {"nvidia.com/gpu": options.worker_gpus}
    if options.worker_machine_type:
        nodes[MACHINE] = options.worker_machine_type
    if options.worker_spot:
        nodes["cloud.google.com/gke-spot"] = "true"
    return nodes, resources


def _tpu(options: argparse.Namespace) -> str:
    """The TPU generation of the workers, "" for GPUs."""
    return options.worker_tpu or ("" if options.worker_gpu else options.tpu or "")


def _variables(options: argparse.Namespace) -> dict[str, str]:
    tls = {n: path for n, path in tls_variables(options).items() if n == "DISTFLOW_TLS_CA"}
    return worker_variables(options, {job.GRACE: str(options.grace_seconds), **tls})
