"""Starts a run on the hosts of a Cloud TPU VM, by gcloud's ssh.

distflow launch tpu_vm --name=my-tpu --zone=us-east5-a --accelerator_type=v5p-32 -- \\
    train --config=grpo_smollm2 --workdir=/shared/runs/first

The TPU must exist. Each of its hosts needs the folder --directory, an interpreter --python with
this package, by default that folder's .venv, and --workdir on a file system that all mount (such as
Filestore). The output of all hosts is printed here. After a failure the same command resumes the
run.
"""

import argparse
import re
import shlex

from distflow_jax.commands.launch import hosts
from distflow_jax.commands.launch.submission_template import add_flags as add_template_flags
from distflow_jax.commands.launch.submission_template import render
from distflow_jax.planning.machine_names import NamedMachine, named_machine

PROGRAM = "distflow launch tpu_vm"
TEMPLATE = "tpu_vm.sh"
KINDS = ("v4", "v5e", "v5p", "v6e")  # of the Cloud TPU API, which has no tpu7x


def make_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """The parser of the flags before `--`, and of the command after it."""
    parser = hosts.cluster_parser(__doc__, program, python=".venv/bin/python")
    add = parser.add_argument
    add("--name", required=True, help="name of the TPU")
    add("--zone", required=True, help="its zone")
    add("--project", default="", help="its project (default: gcloud's own)")
    add("--accelerator_type", required=True, help="its type, such as v5litepod-8 or v5p-32")
    add("--directory", default="distflow_jax", help="folder on the hosts (default distflow_jax)")
    add("--internal_ip", action="store_true", help="connect within the same network")
    add_template_flags(parser, TEMPLATE)
    return parser


def parse_arguments(arguments: list[str], program: str = PROGRAM) -> argparse.Namespace:
    """Parses and checks the flags before `--`, and the command with its flags after it."""
    options = make_parser(program).parse_args(arguments)
    options.command = hosts.python_command(options)
    hosts.name_of("--name", options.name)
    hosts.name_of("--zone", options.zone)
    if options.project and not re.fullmatch(r"[a-z][-a-z0-9:.]*[a-z0-9]", options.project):
        raise ValueError(f"--project must be the name of a project, got {options.project!r}")
    hosts.variables(options.env)
    hosts.one_line("the command", options.directory, options.python, *options.command)
    tpu(options.accelerator_type)
    return options


def tpu(accelerator_type: str) -> NamedMachine:
    """The slice of that type: v5p-32 has 16 chips in 4 hosts. Raises ValueError."""
    try:
        found = named_machine(accelerator_type)
    except ValueError as error:
        raise ValueError(f"--accelerator_type={accelerator_type}: {error}") from None
    if found.chip.name not in KINDS:
        raise ValueError(
            f"--accelerator_type={accelerator_type} is not the type of a TPU VM, such as "
            f"{', '.join(KINDS)}; "
            "distflow launch gke starts runs on other TPUs and on GPUs"
        )
    return found


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The variables of all hosts: JAX takes each host's place from the metadata server."""
    return hosts.variables(options.env) | {"DISTFLOW_DISTRIBUTED": "auto"}


def remote_command(options: argparse.Namespace) -> str:
    """The shell command of each host."""
    words = ["env", *(f"{name}={value}" for name, value in environment(options).items())]
    words += [options.python, *options.command]
    return f"cd {shlex.quote(options.directory)} && exec {shlex.join(words)}"


def main(arguments: list[str], program: str = PROGRAM) -> int:
    """Starts the run, or prints the command; returns the exit code."""
    options = parse_arguments(arguments, program)
    text = render(TEMPLATE, options, remote=remote_command(options))
    slice_ = tpu(options.accelerator_type)
    hosts.check_run(options, slice_.hosts, slice_.devices, slice_.chip.name)
    if options.dry_run:
        print(text)
        return 0
    return hosts.submit(shlex.split(text))
