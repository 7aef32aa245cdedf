"""Workers of a run on Slurm: an array of jobs of their own, each on one node or a share of one.

An array's jobs wait, end and go back into the queue one by one, whatever the trainers' job does.
"""

import argparse
import re
import shlex

from distflow_jax.commands.launch import hosts
from distflow_jax.commands.launch.worker_group import add_worker_flags, worker_variables
from distflow_jax.config.user_error import user_error
from distflow_jax.parallel import job

TRAINERS = "DISTFLOW_TRAINERS"  # number of the trainers' job, for the workers' script
HEREDOC = "END_OF_BATCH"
_AGAIN_SECONDS = 10  # after a crash

BODY = """\
for try in $(seq 0 {retries}); do
    srun {srun} \\
        {command}
    code=$?
    case "$code" in 0|2|75) break ;; esac  # the run has ended; a user error; start it again
    sleep {again}
done
# 75: SIGTERM came, or no trainer answers. Back into the queue, while there are trainers.
if [ "$code" -eq 75 ] && [ -n "$(squeue --noheader --jobs="${trainers}" 2>/dev/null)" ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit "$code"
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the second group."""
    add_worker_flags(parser)
    add = parser.add_argument
    add("--worker_gpus", type=int, default=0, help="GPUs of each worker (default 0)")
    add("--worker_cpus", type=int, default=0, help="CPUs of each worker; 0: a whole node (default)")
    add("--worker_partition", default="", help="partition of the workers (default: --partition)")
    add("--worker_time", default="", help="time limit of each worker (default: --time)")
    add("--worker_retries", type=int, default=3, help="starts after a worker's crash (default 3)")
    add(
        "--worker_option",
        action="append",
        default=[],
        metavar="--NAME=VALUE",
        help="a further option of sbatch for the workers: --worker_option=--nodelist=n[5-8]",
    )


def worker_script(options: argparse.Namespace, header: dict[str, object]) -> str:
    """The batch script of the workers; `header` has the options of sbatch that both groups have."""
    whole = not options.worker_cpus
    mine = header | {
        "job-name": f"{options.job_name}-workers",
        "array": f"0-{options.workers - 1}",
        "nodes": 1,
        "ntasks-per-node": 1,
        "gpus-per-node": options.worker_gpus or None,
        "cpus-per-task": options.worker_cpus or None,
        "mem": 0 if whole else None,
        "time": options.worker_time or options.time,
        "partition": options.worker_partition or options.partition or None,
        "output": re.sub(r"(\.[^./]*)?$", r"-worker%a\1", options.log, count=1),
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={value}" for name, value in mine.items() if value is not None]
    lines += ["#SBATCH --exclusive"] if whole else []
    lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
    lines += [f"#SBATCH {option}" for option in options.worker_option]
    lines += [f"export {hosts.assignments(_variables(options))}", *options.setup]
    srun = "--nodes=1 --ntasks=1 "
    srun += "--cpu-bind=none" if whole else f"--cpus-per-task={options.worker_cpus}"
    body = BODY.format(
        retries=options.worker_retries,
        srun=srun,
        command=shlex.join([options.python, *options.worker]),
        again=_AGAIN_SECONDS,
        trainers=TRAINERS,
    )
    return "\n".join(lines) + "\n\n" + body


def worker_hosts(options: argparse.Namespace) -> list[hosts.Host]:
    """The workers, with the variables that Slurm sets for each."""
    command = [options.python, *options.worker]
    found = []
    for i in range(options.workers):
        added = {"SLURM_ARRAY_TASK_ID": str(i)} | _variables(options)
        found.append(hosts.Host(f"worker{i}", added, command))
    return found


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
    code, number = hosts.submitted(["sbatch", "--parsable"], trainers)
    if code:
        return code
    number = number.partition(";")[0]  # after it the cluster
    print(f"the trainers are job {number}", flush=True)
    code = hosts.submit(["sbatch", *worker_arguments(number)], workers)
    if code:
        user_error(f"the workers were not submitted; `scancel {number}` takes the trainers back")
    return code


def _variables(options: argparse.Namespace) -> dict[str, str]:
    return worker_variables(options, {job.GRACE: str(options.grace_seconds)})
