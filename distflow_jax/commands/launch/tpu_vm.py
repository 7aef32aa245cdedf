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

PROGRAM = "distflow launch tpu_vm"
TEMPLATE = "tpu_vm.sh"
# {accelerator type: TensorCores per chip, which the number in its name counts}
CORES_PER_CHIP = {"v4": 2, "v5p": 2, "v5litepod": 1, "v6e": 1}
CHIP_OF = {"v4": "v5p", "v5p": "v5p", "v5litepod": "v5e", "v6e": "v6e"}  # or one that is like it
FLAT_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)  # chips of v5e and v6e
CHIPS_PER_HOST = 4  # in slices of several hosts; a single host has up to 8 chips of v5e and v6e


def make_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """The parser of the flags before `--`, and of the command after it."""
    parser = hosts.cluster_parser(__doc__, program, python=".venv/bin/python")
    add = parser.add_argument
    add("--name", required=True, help="name of the TPU")
    add("--zone", required=True, help="its zone")
    add("--project", default="", help="its project (default: gcloud's own)")
    add("--accelerator_type", required=True, help="its type, such as v5p-32 or v6e-256")
    add("--directory", default="distflow_jax", help="folder on the hosts (default distflow_jax)")
    add("--internal_ip", action="store_true", help="connect within the same network")
    add_template_flags(parser, TEMPLATE)
    return parser


def parse_arguments(arguments: list[str], program: str = PROGRAM) -> argparse.Namespace:
    """Parses and checks the flags before `--`, and the command with its flags after it."""
    options = make_parser(program).parse_args(arguments)
    options.command = hosts.python_command(options)
    hosts.name_of("--name", options.name, length=63)
    hosts.name_of("--zone", options.zone, length=63)
    if options.project and not re.fullmatch(r"[a-z][-a-z0-9:.]*[a-z0-9]", options.project):
        raise ValueError(f"--project must be the name of a project, got {options.project!r}")
    hosts.variables(options.env)
    hosts.one_line("the command", options.directory, options.python, *options.command)
    num_hosts(options.accelerator_type)
    return options


def num_hosts(accelerator_type: str) -> int:
    """Hosts of a TPU of this type: v5p-32 is 32 cores, 16 chips, 4 hosts."""
    parts = re.fullmatch(r"(v\d\w*)-([1-9]\d*)", accelerator_type, re.ASCII)
    if parts is None or parts[1] not in CORES_PER_CHIP:
        raise ValueError(
            f"--accelerator_type must be one of {', '.join(CORES_PER_CHIP)} with a number, such as "
            f"v5p-32, got {accelerator_type!r}"
        )
    cores = int(parts[2])
    if CORES_PER_CHIP[parts[1]] == 1:
        if cores not in FLAT_SIZES:
            raise ValueError(
                f"--accelerator_type={accelerator_type}: sizes are "
                f"{', '.join(map(str, FLAT_SIZES))}"
            )
        return max(1, cores // CHIPS_PER_HOST) if cores > 8 else 1
    chips, rest = divmod(cores, CORES_PER_CHIP[parts[1]])
    if rest or chips % CHIPS_PER_HOST:
        raise ValueError(
            f"--accelerator_type={accelerator_type} counts cores, 2 per chip and 8 per host; use a "
            "multiple of 8"
        )
    return chips // CHIPS_PER_HOST


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The variables of all hosts: JAX takes each host's place from the metadata server."""
    return hosts.variables(options.env) | {"DISTFLOW_DISTRIBUTED": "auto"}


def remote_command(options: argparse.Namespace) -> str:
    """The shell command of each host."""
    words = ["env", *(f"{name}={value}" for name, value in environment(options).items())]
    words += [options.python, *options.command]
    return f"cd {shlex.quote(options.directory)} && exec {shlex.join(words)}"


def run_hosts(options: argparse.Namespace) -> list[hosts.Host]:
    """The workers of the TPU."""
    command = [options.python, *options.command]
    return [
        hosts.Host(f"worker {i}", environment(options), command)
        for i in range(num_hosts(options.accelerator_type))
    ]


def main(arguments: list[str], program: str = PROGRAM) -> int:
    """Starts the run, or prints the command; returns the exit code."""
    options = parse_arguments(arguments, program)
    text = render(TEMPLATE, options, remote=remote_command(options))
    kind, count = options.accelerator_type.partition("-")[0], num_hosts(options.accelerator_type)
    chips = int(options.accelerator_type.rpartition("-")[2]) // CORES_PER_CHIP[kind]
    hosts.check_run(options, count, chips, CHIP_OF[kind])
    if options.dry_run:
        where = f"in {options.directory} on the hosts"
        print(f"{text}\n{hosts.describe(run_hosts(options), where)}")
        return 0
    return hosts.submit(shlex.split(text))
