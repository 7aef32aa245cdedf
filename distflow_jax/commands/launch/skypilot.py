"""Starts a run as a managed job of SkyPilot, one process per node, on the clouds it knows.

distflow launch skypilot --name=first --gpu=H100 --nodes=2 --volume=shared:/shared \\
    --setup='pip install -e .[gpu]' -- \\
    train --config=grpo_smollm2 --workdir=/shared/runs/first

SkyPilot copies --directory to the nodes and runs --setup there; --image has the packages instead.
--workdir must be on a volume that all nodes mount (`sky volumes`); a bucket is none, as a run
appends to its files and renames them.
A job whose nodes are taken away begins again on others, and resumes. So does one that ends with 75,
and after another failure it is started again --max_restarts times.
"""

import argparse
import pathlib
import re
import shlex
import tempfile

from distflow_jax.cluster import job
from distflow_jax.commands.launch import hosts
from distflow_jax.commands.launch.submission_template import add_flags as add_template_flags
from distflow_jax.commands.launch.submission_template import render

PROGRAM = "distflow launch skypilot"
TEMPLATE = "skypilot.yaml"


def make_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """The parser of the flags before `--`, and of the command after it."""
    parser = hosts.cluster_parser(__doc__, program, python="python")
    add = parser.add_argument
    add("--name", required=True, help="name of the job")
    add("--nodes", type=int, default=1, help="number of nodes (default 1)")
    add("--gpu", default="", help="GPU type in SkyPilot's names, such as H100 or H200")
    add("--gpus_per_node", type=int, default=8, help="GPUs of each node (default 8)")
    add("--infra", default="", help="where: a cloud, region or Kubernetes context (default: any)")
    add("--spot", action="store_true", help="use preemptible (spot) nodes")
    add("--image", default="", help="container image (default: SkyPilot's own)")
    add("--directory", default=".", help="folder that is copied to the nodes (default: this one)")
    parser.repeated("--volume", "NAME:PATH", "a volume of SkyPilot and its path on the nodes")
    parser.repeated(
        "--setup",
        "LINE",
        "a line of shell that prepares a node, such as --setup='pip install -e .[gpu]'",
    )
    add("--max_restarts", type=int, default=3, help="restarts after a failure (default 3)")
    add_template_flags(parser, TEMPLATE)
    return parser


def parse_arguments(arguments: list[str], program: str = PROGRAM) -> argparse.Namespace:
    """Parses and checks the flags before `--`, and the command with its flags after it."""
    options = make_parser(program).parse_args(arguments)
    options.command = hosts.python_command(options)
    hosts.name_of("--name", options.name)
    hosts.at_least(1, nodes=options.nodes, gpus_per_node=options.gpus_per_node)
    hosts.at_least(0, max_restarts=options.max_restarts)
    for flag in ("gpu", "infra", "image"):
        if not re.fullmatch(r"[\w./:@*-]*", getattr(options, flag)):
            raise ValueError(f"--{flag} takes no spaces or quotes, got {getattr(options, flag)!r}")
    hosts.variables(options.env)
    hosts.one_line("--setup", *options.setup)
    hosts.one_line("the command", options.python, *options.command)
    hosts.check_workdir(options.command, hosts.volumes(options.volume, "NAME"))
    return options


def main(arguments: list[str], program: str = PROGRAM) -> int:
    """Submits the job, or prints it; returns the exit code."""
    options = parse_arguments(arguments, program)
    text = render(
        TEMPLATE,
        options,
        env=hosts.variables(options.env),
        command=shlex.join([options.python, *options.command]),
        volumes=hosts.volumes(options.volume, "NAME"),
        port=job.COORDINATOR_PORT,
    )
    devices = options.nodes * (options.gpus_per_node if options.gpu else 1)
    hosts.check_run(options, options.nodes, devices, hosts.gpu_chip(options.gpu), options.directory)
    if options.dry_run:
        print(text)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, f"{options.name}.yaml")
        file.write_text(text)
        return hosts.submit(["sky", "jobs", "launch", "--yes", str(file)])
