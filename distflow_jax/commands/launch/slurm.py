"""Starts a run on a Slurm cluster, one process per node.

distflow launch slurm --nodes=4 --gpus_per_node=8 --time=04:00:00 -- \\
    train --config=grpo_smollm2 --workdir=runs/first

The package or this checkout, the interpreter and --workdir must be on a file system that all nodes
mount.
--grace_seconds before the time limit, Slurm sends SIGTERM to the processes; they save a checkpoint
and exit with 75, and the job is requeued under its number and resumes.
`scancel --signal=TERM JOB` does the same at any time; `scancel JOB` ends the run without a
checkpoint.
--workers=N submits N workers of a run with stream.workers too, as an array of jobs with nodes of
their own. They begin after the trainers, and outlive a restart of these.
"""

import argparse
import os
import pathlib
import re
import shlex
import sys

from distflow_jax.commands.launch import hosts, slurm_workers
from distflow_jax.commands.launch.slurm_workers import worker_script
from distflow_jax.commands.launch.worker_group import group_command
from distflow_jax.parallel import job
from distflow_jax.parsing.paths import named_path

PROGRAM = "distflow launch slurm"
# Longest time between the ends of two processes: srun's exit code is the highest of theirs, and the
# code of a process that srun kills for being late would hide the 75 of the others.
LATE_SECONDS = 60

# a new secret at each start, which srun passes on: the processes of this step admit no others
BODY = """\
export {token}="${{{token}:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}"
srun {srun} \\
    {command}
code=$?
# 75: SIGTERM came, a checkpoint is saved, start again. Anything else is the end of the job.
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def make_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """The parser of the flags before `--`, and of the command after it."""
    parser = hosts.cluster_parser(__doc__, program, python="")
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="number of nodes (default 1)")
    add("--gpus_per_node", type=int, default=0, help="GPUs of each node (default 0)")
    add("--cpus_per_node", type=int, default=0, help="CPUs of each node; 0: whole nodes (default)")
    add("--time", required=True, help="time limit in Slurm's format: 04:00:00, 2-12, 30")
    add("--partition", default="", help="partition")
    add("--account", default="", help="account")
    add("--job_name", default="distflow", help="name of the job (default distflow)")
    add("--log", default="slurm-%j.log", help="file for the output (default slurm-%%j.log)")
    add("--directory", default="", help="folder to run in (default: this one)")
    add(
        "--grace_seconds",
        type=int,
        default=300,
        help="time between SIGTERM and the limit, for a step and a checkpoint (default 300)",
    )
    add(
        "--option",
        action="append",
        default=[],
        metavar="--NAME=VALUE",
        help="a further option of sbatch, such as --option=--qos=high",
    )
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a line of shell to run first, such as --setup='module load cuda'",
    )
    slurm_workers.add_flags(parser)
    return parser


def parse_arguments(arguments: list[str], program: str = PROGRAM) -> argparse.Namespace:
    """Parses and checks the flags before `--`, and the command with its flags after it."""
    options = make_parser(program).parse_args(arguments)
    options.python = options.python or sys.executable
    options.directory = str(named_path("--directory", options.directory or os.getcwd()))
    options.log = str(named_path("--log", options.log))  # Slurm replaces %j and no ~
    options.command = hosts.python_command(options)
    check(options)
    options.worker = group_command(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that Slurm would refuse or misinterpret."""
    hosts.at_least(1, nodes=options.nodes)
    hosts.at_least(0, gpus_per_node=options.gpus_per_node, cpus_per_node=options.cpus_per_node)
    hosts.variables(options.env)
    limit = seconds(options.time)
    if not 0 < options.grace_seconds < min(limit, 65536):
        raise ValueError(
            f"--grace_seconds={options.grace_seconds} must be above 0 and below --time="
            f"{options.time} ({limit} seconds)"
        )
    hosts.at_least(0, worker_gpus=options.worker_gpus, worker_cpus=options.worker_cpus)
    hosts.at_least(0, worker_retries=options.worker_retries)
    longest = seconds(options.worker_time or options.time, "--worker_time")
    if longest <= options.grace_seconds:
        raise ValueError(
            f"--worker_time={options.worker_time} must be above --grace_seconds="
            f"{options.grace_seconds}"
        )
    # a header ends at the end of its line, and is split at spaces
    for name in ("partition", "account", "job_name", "log", "directory", "worker_partition"):
        if re.search(r"[\s\"'\\]", getattr(options, name)):
            raise ValueError(f"--{name} takes no spaces or quotes, got {getattr(options, name)!r}")
    for flag in ("option", "worker_option"):
        for option in getattr(options, flag):
            if not re.fullmatch(r"--[a-z][-a-z]*(=[^\s\"'\\]+)?", option):
                raise ValueError(f"--{flag} must be --NAME=VALUE without spaces, got {option!r}")
    hosts.one_line("--setup", *options.setup)
    hosts.one_line("the command", options.python, *options.command, *options.worker_flag)
    for name in (*job.VARIABLES, job.DISTRIBUTED):
        if os.environ.get(name):
            raise ValueError(
                f"{name}={os.environ[name]} is set, and sbatch would pass it on; unset it"
            )
    script = pathlib.Path(options.directory) / options.command[0]
    if script.suffix == ".py" and not script.is_file():
        raise ValueError(f"{options.command[0]} does not exist in {options.directory}")


def seconds(time: str, flag: str = "--time") -> int:
    """Seconds of Slurm's time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if parts is None:
        raise ValueError(f"{flag} must read like 04:00:00 or 2-12, got {time!r}")
    days, *rest = parts.groups()
    first, second, third = (int(x or 0) for x in rest)
    if days is None and rest[2] is None:  # M or M:S
        first, second, third = 0, first, second
    return ((int(days or 0) * 24 + first) * 60 + second) * 60 + third


def shared_header(options: argparse.Namespace) -> dict[str, object]:
    """The options of sbatch that trainers and workers have alike."""
    return {
        "account": options.account or None,
        "chdir": options.directory,
        # to the processes, not to this script (B:TERM), which would pass SIGTERM on to srun, and
        # srun would kill the processes
        "signal": f"TERM@{options.grace_seconds}",
    }


def script(options: argparse.Namespace) -> str:
    """The batch script for sbatch."""
    whole = not options.cpus_per_node
    header = shared_header(options) | {
        "job-name": options.job_name,
        "nodes": options.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": options.gpus_per_node or None,
        "cpus-per-task": options.cpus_per_node or None,
        "mem": 0 if whole else None,
        "time": options.time,
        "partition": options.partition or None,
        "output": options.log,
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={value}" for name, value in header.items() if value is not None]
    lines += ["#SBATCH --exclusive"] if whole else []
    lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
    lines += [f"#SBATCH {option}" for option in options.option]
    variables = {job.GRACE: str(options.grace_seconds)} | hosts.variables(options.env)
    lines += [f"export {hosts.assignments(variables)}"]
    lines += options.setup
    srun = f"--nodes={options.nodes} --ntasks={options.nodes} --ntasks-per-node=1"
    # the default is one CPU per task, whatever the job has
    srun += " --cpu-bind=none" if whole else f" --cpus-per-task={options.cpus_per_node}"
    srun += f" --kill-on-bad-exit=0 --wait={LATE_SECONDS}"
    command = shlex.join([options.python, *options.command])
    return "\n".join(lines) + "\n\n" + BODY.format(token=job.TOKEN, srun=srun, command=command)


def run_hosts(options: argparse.Namespace) -> list[hosts.Host]:
    """The nodes, with the variables that srun sets for the task on each."""
    count = options.nodes
    step = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NODELIST": f"node[0-{count - 1}]" if count > 1 else "node0",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})" if count > 1 else "1",
        "SLURM_LOCALID": "0",
    }
    command = [options.python, *options.command]
    return [
        hosts.Host(
            f"node{i}",
            step | {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)} | hosts.variables(options.env),
            command,
        )
        for i in range(count)
    ]


def main(arguments: list[str], program: str = PROGRAM) -> int:
    """Submits the job, and that of the workers, or prints them; returns the exit code."""
    options = parse_arguments(arguments, program)
    text = script(options)
    where = "on the nodes (Slurm chooses their names and the number of the job)"
    workers = worker_script(options, shared_header(options)) if options.workers else ""
    if options.dry_run:
        shown = run_hosts(options)
        if workers:
            text = slurm_workers.submission(text, workers)
            shown += slurm_workers.worker_hosts(options)
        print(f"{text}\n{hosts.describe(shown, where)}")
        return 0
    gpus = options.gpus_per_node
    chip, devices = "h100" if gpus else "", options.nodes * max(1, gpus)
    hosts.check_run(options, options.nodes, devices, chip, options.directory)
    return slurm_workers.submit(text, workers) if workers else hosts.submit(["sbatch"], text)
