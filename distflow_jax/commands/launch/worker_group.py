"""Workers of a run as a second group of hosts: their command, and the flags of cluster launchers.

The group is a job of its own, so that it outlives a restart of the trainers and may grow or end
without them. Each host has one worker, which joins by the run's folder.
"""

import argparse
import re
from collections.abc import Mapping, Sequence

from distflow_jax.cluster import job
from distflow_jax.commands.launch import hosts

JOIN_SECONDS = 1800  # for trainers that are started, or started again
LISTEN = "config.stream.listen"
_LOOPBACK = ("", "127.0.0.1", "localhost", "[::1]")


def worker_command(command: Sequence[str]) -> list[str]:
    """The interpreter's arguments of a worker, from those of a training run.

    ValueError where they are no training run, or name no folder.
    """
    found = hosts.train_flags(command)
    if found is None:
        raise ValueError("--workers needs a training run after --: train, or scripts/train.py")
    place, kept, workdir = found
    if not workdir:
        raise ValueError("--workers needs the run's --workdir, where workers find the trainers")
    first = command[place]
    script = "worker" if first == "train" else first.removesuffix("train.py") + "worker.py"
    return [*command[:place], script, *kept, f"--join={workdir}"]


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that says how large the second group is."""
    what = "number of workers of a run with stream.workers (default 0)"
    parser.add_argument("--workers", type=int, default=0, help=what)


def add_worker_flags(parser: hosts.LauncherParser) -> None:
    """Adds the flags of the second group that all clusters have."""
    add_workers(parser)
    parser.repeated(
        "--worker_flag",
        "--NAME=VALUE",
        "a further flag of each worker, such as --worker_flag=--join_seconds=60",
    )


def group_command(options: argparse.Namespace) -> list[str]:
    """The interpreter's arguments of a worker of the cluster; [] without workers.

    ValueError for a run that workers on other hosts cannot join.
    """
    hosts.at_least(0, workers=options.workers)
    if not options.workers:
        return []
    for flag in options.worker_flag:
        if not re.fullmatch(r"--[a-z][\w.]*(=.*)?", flag):
            raise ValueError(f"--worker_flag must be --NAME=VALUE, got {flag!r}")
    command = worker_command(options.command)
    listen = _value(command, LISTEN)
    if listen.rpartition(":")[0] in _LOOPBACK:
        raise ValueError(
            f"workers on other hosts cannot reach trainers at {listen or '127.0.0.1:0'}: pass "
            f"--{LISTEN}=0.0.0.0:0 to the run, or an address in their network"
        )
    if _value(command, "config.stream.workers").lower() not in ("true", "1"):
        raise ValueError("--workers needs a run with --config.stream.workers=True")
    waits = [f"--{name}={JOIN_SECONDS}" for name in ("join_seconds", "orphan_seconds")]
    return [*command, *waits, *options.worker_flag]


def worker_variables(options: argparse.Namespace, own: Mapping[str, str]) -> dict[str, str]:
    """Variables of each worker, a job of one process wherever it runs."""
    return {job.DISTRIBUTED: "off", **own, **hosts.variables(options.env)}


def _value(command: Sequence[str], name: str) -> str:
    """The last value of a flag, "" without it."""
    pattern = re.compile(rf"--?{re.escape(name)}(?:=(.*))?")
    found = ""
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if match := pattern.fullmatch(word):
            found = after if match[1] is None else match[1]
    return found
