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

from distflow_jax.cluster import job
from distflow_jax.commands.launch import hosts
from distflow_jax.commands.launch.submission_template import add_flags as add_template_flags
from distflow_jax.commands.launch.submission_template import render
from distflow_jax.commands.launch.worker_group import (
    add_worker_flags,
    group_command,
    worker_variables,
)
from distflow_jax.config.user_error import user_error
from distflow_jax.parsing.paths import named_path

PROGRAM = "distflow launch slurm"
TEMPLATE = "slurm.sh"
TRAINERS = "DISTFLOW_TRAINERS"  # number of the trainers' job, for the workers' script
HEREDOC = "END_OF_BATCH"


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
    parser.repeated(
        "--option", "--NAME=VALUE", "a further option of sbatch, such as --option=--qos=high"
    )
    parser.repeated(
        "--setup", "LINE", "a line of shell to run first, such as --setup='module load cuda'"
    )
    add_template_flags(parser, TEMPLATE)
    add_worker_flags(parser)
    add("--worker_gpus", type=int, default=0, help="GPUs of each worker (default 0)")
    add("--worker_cpus", type=int, default=0, help="CPUs of each worker; 0: a whole node (default)")
    add("--worker_partition", default="", help="partition of the workers (default: --partition)")
    add("--worker_time", default="", help="time limit of each worker (default: --time)")
    add("--worker_retries", type=int, default=3, help="starts after a worker's crash (default 3)")
    parser.repeated(
        "--worker_option",
        "--NAME=VALUE",
        "a further option of sbatch for the workers: --worker_option=--nodelist=n[5-8]",
    )
    return parser


def parse_arguments(arguments: list[str], program: str = PROGRAM) -> argparse.Namespace:
    """Parses and checks the flags before `--`, and the command with its flags after it."""
    options = make_parser(program).parse_args(arguments)
    options.python = options.python or sys.executable
    options.directory = str(named_path("--directory", options.directory or os.getcwd()))
    options.log = str(named_path("--log", options.log, written=True))  # Slurm replaces %j and no ~
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


def script(options: argparse.Namespace) -> str:
    """The batch script of the trainers for sbatch."""
    return render(
        TEMPLATE,
        options,
        workers=False,
        job_name=options.job_name,
        array="",
        nodes=options.nodes,
        gpus=options.gpus_per_node,
        cpus=options.cpus_per_node,
        time=options.time,
        partition=options.partition,
        log=options.log,
        extra=options.option,
        env=hosts.assignments(
            {job.GRACE: str(options.grace_seconds)} | hosts.variables(options.env)
        ),
        command=shlex.join([options.python, *options.command]),
    )


def worker_script(options: argparse.Namespace) -> str:
    """The batch script of the workers: an array of jobs, which wait, end and begin one by one."""
    return render(
        TEMPLATE,
        options,
        workers=True,
        job_name=f"{options.job_name}-workers",
        array=f"0-{options.workers - 1}",
        nodes=1,
        gpus=options.worker_gpus,
        cpus=options.worker_cpus,
        time=options.worker_time or options.time,
        partition=options.worker_partition or options.partition,
        log=re.sub(r"(\.[^./]*)?$", r"-worker%a\1", options.log, count=1),
        extra=options.worker_option,
        env=hosts.assignments(own_variables(options)),
        command=shlex.join([options.python, *options.worker]),
    )


def own_variables(options: argparse.Namespace) -> dict[str, str]:
    """The variables of each worker."""
    return worker_variables(options, {job.GRACE: str(options.grace_seconds)})


def submission(trainers: str, workers: str) -> str:
    """A shell script that submits both groups, each batch script as it is."""
    return f"""\
trainers=$(sbatch --parsable <<'{HEREDOC}'
{trainers}{HEREDOC}
)
trainers=${{trainers%%;*}}
sbatch {" ".join(worker_arguments("$trainers"))} <<'{HEREDOC}'
{workers}{HEREDOC}
"""


def worker_arguments(trainers: str) -> list[str]:
    """Arguments of sbatch for the workers, which begin when the trainers' job has begun."""
    return [f"--dependency=after:{trainers}", f"--export=ALL,{TRAINERS}={trainers}"]


def submit(trainers: str, workers: str) -> int:
    """Submits both groups; returns the exit code of sbatch."""
    done = hosts.submitted(["sbatch", "--parsable"], trainers)
    if done.returncode:
        return done.returncode
    number = done.stdout.strip().partition(";")[0]  # after it the cluster
    print(f"the trainers are job {number}", flush=True)
    code = hosts.submit(["sbatch", *worker_arguments(number)], workers)
    if code:
        user_error(f"the workers were not submitted; `scancel {number}` cancels the trainers")
    return code


def main(arguments: list[str], program: str = PROGRAM) -> int:
    """Submits the job, and that of the workers, or prints them; returns the exit code."""
    options = parse_arguments(arguments, program)
    text = script(options)
    workers = worker_script(options) if options.workers else ""
    gpus = options.gpus_per_node
    chip, devices = "gpu" if gpus else "", options.nodes * max(1, gpus)
    hosts.check_run(options, options.nodes, devices, chip, options.directory)
    if options.dry_run:
        print(submission(text, workers) if workers else text)
        return 0
    return submit(text, workers) if workers else hosts.submit(["sbatch"], text)
