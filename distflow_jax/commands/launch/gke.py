"""Starts a run on Google Kubernetes Engine as a JobSet, one pod per host.

distflow launch gke --name=first --image=IMAGE --tpu=v5p --topology=2x2x2 \\
    --volume=shared:/shared -- train --config=grpo_smollm2 --workdir=/shared/runs/first

The image holds the package with its extra tpu or gpu (Dockerfile makes one); IMAGE is its address.
--workdir must be on a volume that all pods mount; group 1000, that of the image's user, gets the
right to write there. For GPU nodes give --gpu=TYPE, --nodes and --gpus_per_node instead of --tpu
and --topology.
When a pod exits with another code than 0, all are restarted, at most --max_restarts times: after a
crash, and after a SIGTERM (75, with a checkpoint saved). A user error (2) ends the run.
--workers=N starts N workers of a run with stream.workers too, as a Job with nodes of their own. A
worker that crashes, or finds no trainer, is started again by itself.
The cluster needs JobSet 0.6 or later, and Kubernetes 1.29 for workers.
"""

import argparse
import math
import re
from typing import Any

from distflow_jax.cluster import job
from distflow_jax.commands.launch import gke_workers, hosts
from distflow_jax.commands.launch.gke_workers import TPUS, spot_nodes, tpu_nodes
from distflow_jax.commands.launch.submission_template import add_flags as add_template_flags
from distflow_jax.commands.launch.submission_template import render
from distflow_jax.commands.launch.worker_group import group_command
from distflow_jax.config.user_error import EXIT_USAGE
from distflow_jax.planning.chips import CHIPS
from distflow_jax.planning.machine_names import FLAT, SMALL

PROGRAM = "distflow launch gke"
TEMPLATE = "gke.yaml"
REPLICATED_JOB = "hosts"
QUEUE = "kueue.x-k8s.io/queue-name"


def make_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """The parser of the flags before `--`, and of the command after it."""
    parser = hosts.cluster_parser(__doc__, program, python="python")
    add = parser.add_argument
    add("--name", required=True, help="name of the JobSet")
    add("--namespace", default="default", help="namespace (default default)")
    add("--image", required=True, help="container image")
    add("--tpu", choices=sorted(TPUS), help="TPU generation")
    add("--topology", default="", help="chips of a slice, such as 4x4x4 or 16x16")
    add("--slices", type=int, default=1, help="slices, each in its own node pool (default 1)")
    add("--chips_per_host", type=int, default=0, help="8 for hosts of 8 chips (default 4)")
    add("--gpu", default="", help="GPU type, such as nvidia-h100-80gb")
    add("--nodes", type=int, default=1, help="GPU nodes (default 1)")
    add("--gpus_per_node", type=int, default=8, help="GPUs of each node (default 8)")
    add("--spot", action="store_true", help="use preemptible (spot) nodes")
    parser.repeated(
        "--volume", "CLAIM:PATH", "a PersistentVolumeClaim (ReadWriteMany) and its path in the pods"
    )
    parser.repeated(
        "--secret", "NAME", "a Secret whose entries become environment variables, such as HF_TOKEN"
    )
    add("--directory", default="", help="folder to run in (default: the image's)")
    add("--queue", default="", help="a LocalQueue of Kueue, which admits the job")
    add("--max_restarts", type=int, default=100, help="restarts of the whole run (default 100)")
    add(
        "--grace_seconds",
        type=int,
        default=300,
        help="time between SIGTERM and SIGKILL, for a step and a checkpoint (default 300)",
    )
    add_template_flags(parser, TEMPLATE)
    gke_workers.add_flags(parser)
    return parser


def parse_arguments(arguments: list[str], program: str = PROGRAM) -> argparse.Namespace:
    """Parses and checks the flags before `--`, and the command with its flags after it."""
    options = make_parser(program).parse_args(arguments)
    options.command = hosts.python_command(options)
    check(options)
    gke_workers.check_group(options)
    options.worker = group_command(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that the cluster would refuse or misinterpret."""
    if bool(options.tpu) == bool(options.gpu):
        raise ValueError("give either --tpu and --topology, or --gpu")
    hosts.at_least(1, slices=options.slices, nodes=options.nodes)
    hosts.at_least(1, gpus_per_node=options.gpus_per_node, grace_seconds=options.grace_seconds)
    hosts.at_least(0, max_restarts=options.max_restarts)
    count = num_hosts(options)
    if options.slices > 1 and not (options.tpu and count > 1):
        raise ValueError(f"--slices={options.slices} needs TPU slices of more than one host")
    # the longest name derived from it is a pod's, with at most 63 characters
    longest = len(f"-{REPLICATED_JOB}-{options.slices - 1}-{count - 1}-xxxxx")
    hosts.name_of("--name", options.name, length=63 - longest)
    hosts.name_of("--namespace", options.namespace)
    for secret in options.secret:
        hosts.name_of("--secret", secret)
    for flag in ("queue", "gpu"):
        if name := getattr(options, flag):
            hosts.name_of(f"--{flag}", name)
    if not re.fullmatch(r"[^\s\"']+", options.image):
        raise ValueError(f"--image takes no spaces or quotes, got {options.image!r}")
    hosts.variables(options.env)
    hosts.one_line("the command", options.python, *options.command, *options.worker_flag)
    hosts.check_workdir(options.command, hosts.volumes(options.volume, "CLAIM"))


def chips_per_host(options: argparse.Namespace) -> int:
    """Chips of the machine type: 1, 4 or, for 2x4 on one host, 8."""
    return options.chips_per_host or (1 if options.topology == "1x1" else 4)


def chip_of(options: argparse.Namespace) -> str:
    """The chip whose kernels and memory a run is planned with."""
    return options.tpu or hosts.gpu_chip(options.gpu)


def num_hosts(options: argparse.Namespace) -> int:
    """Hosts of one slice, or GPU nodes. Raises ValueError for a slice that does not exist."""
    if options.gpu:
        return options.nodes
    check_topology(options.tpu, options.topology)
    chips = math.prod(map(int, options.topology.split("x")))
    each = chips_per_host(options)
    if each not in (1, 4) and (each, options.topology) != (8, "2x4"):
        raise ValueError(f"--chips_per_host must be 4, or 8 for 2x4, got {each}")
    if (each == 1) != (chips == 1):
        raise ValueError(f"hosts of {each} chips cannot make up --topology={options.topology}")
    return chips // each


def check_topology(tpu: str, topology: str) -> None:
    """Raises ValueError for a topology that this generation does not have."""
    dims = CHIPS[tpu].dims
    fixed = ["x".join(map(str, sizes)) for sizes in (FLAT if dims == 2 else SMALL)]
    if dims == 2 and topology not in fixed:
        raise ValueError(f"--topology of {tpu} must be one of {', '.join(fixed)}, got {topology!r}")
    written = re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", topology, re.ASCII)
    sides = [int(side) for side in topology.split("x")] if written else []
    large = written and sides == sorted(sides) and all(side % 4 == 0 for side in sides)
    if dims == 3 and topology not in fixed and not large:
        raise ValueError(
            f"--topology of {tpu} must be one of {', '.join(fixed)}, or AxBxC with multiples of 4 "
            f"in rising order, got {topology!r}"
        )


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the manifest sets, equal in all pods."""
    mine = {job.GRACE: str(options.grace_seconds)} | gke_workers.tls_variables(options)
    mine |= hosts.variables(options.env)
    if num_hosts(options) * options.slices == 1:
        return mine | {"DISTFLOW_DISTRIBUTED": "off"}
    if options.tpu:
        return mine  # GKE sets the variables by which pods and slices find each other
    return mine | {
        "DISTFLOW_COORDINATOR": f"{pod(options, 0, 0)}:{job.COORDINATOR_PORT}",
        "DISTFLOW_NUM_PROCESSES": str(options.nodes),
    }


def pod(options: argparse.Namespace, part: int, index: int) -> str:
    """A pod's name in the JobSet's own domain."""
    return f"{options.name}-{REPLICATED_JOB}-{part}-{index}.{options.name}"


def trainer_group(options: argparse.Namespace) -> dict[str, Any]:
    """The trainers of the template."""
    if options.tpu:
        nodes = tpu_nodes(options.tpu, options.topology)
        limits = {"google.com/tpu": chips_per_host(options)}
    else:
        nodes = {"cloud.google.com/gke-accelerator": options.gpu}
        limits = {"nvidia.com/gpu": options.gpus_per_node}
    return {
        "command": [options.python, *options.command],
        "env": environment(options),
        "nodes": nodes | spot_nodes(options.spot),
        "limits": limits,
        "host_network": options.slices > 1,
    }


def manifest(options: argparse.Namespace) -> str:
    """The JobSet: one job per slice, or one of all GPU nodes; with --workers their Job too."""
    return render(
        TEMPLATE,
        options,
        trainers=trainer_group(options),
        workers=gke_workers.worker_group(options) if options.workers else None,
        hosts=num_hosts(options),
        labels=labels(options),
        volumes=hosts.volumes(options.volume, "CLAIM"),
        user_error=EXIT_USAGE,
        tls_folder=gke_workers.TLS_FOLDER,
    )


def labels(options: argparse.Namespace) -> dict[str, str]:
    """Labels of both groups: what deletes them together, and the queue of Kueue."""
    found = {gke_workers.LABEL: options.name} if options.workers else {}
    return found | ({QUEUE: options.queue} if options.queue else {})


def main(arguments: list[str], program: str = PROGRAM) -> int:
    """Submits the JobSet, and the Job of the workers, or prints them; returns the exit code."""
    options = parse_arguments(arguments, program)
    text = manifest(options)
    count = num_hosts(options) * options.slices
    each = options.gpus_per_node
    if options.tpu:
        each = chips_per_host(options) * CHIPS[options.tpu].devices
    hosts.check_run(options, count, count * each, chip_of(options))
    if options.dry_run:
        print(text)
        return 0
    return hosts.submit(["kubectl", "create", "--filename=-"], text)
