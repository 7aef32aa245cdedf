"""The batch file of scripts/launch/slurm.py, by itself and run by a stand-in for Slurm."""

import json
import os
import signal
import subprocess
import time

import pytest
from support.launchers import SLURM, dry_run, program
from support.paths import ROOT
from support.waiting import HANG

from distflow_jax.commands.launch import slurm

# -- Slurm ------------------------------------------------------------------------------------


def test_the_batch_file(capsys):
    flags = ["--partition=gpu", "--account=me", "--option=--qos=high", "--setup=module load cuda"]
    text, _ = dry_run(slurm, [*SLURM, *flags, "--env=GREETING=it's me"], capsys)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")} == {
        "--job-name=distflow",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--time=04:00:00",
        "--partition=gpu",
        "--account=me",
        "--output=slurm-%j.log",
        f"--chdir={ROOT}",
        "--requeue",
        "--open-mode=append",
        "--signal=TERM@300",
        "--qos=high",
    }
    assert "module load cuda" in lines
    assert not [line for line in lines[lines.index("module load cuda") :] if "#SBATCH" in line]
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_share_of_each_node(capsys):
    text, _ = dry_run(slurm, [*SLURM, "--cpus_per_node=16"], capsys)
    assert "#SBATCH --cpus-per-task=16\n" in text and " --cpus-per-task=16 --kill" in text
    assert "--exclusive" not in text and "--mem" not in text


# Starts the tasks of a step with the variables that srun gives them, and waits as it does. Like
# the real one it would kill them upon SIGTERM: it is the tasks that are signalled.
SRUN = """
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
flags = dict(option[2:].split("=") for option in options[: sys.argv[1:].index(sys.executable)])
count = int(flags["ntasks"])
tasks = []
for i in range(count):
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NODELIST": f"n[1-{count}]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})",
        "SLURM_PROCID": str(i), "SLURM_NODEID": str(i), "SLURM_LOCALID": "0",
    }
    command = sys.argv[1 + len(flags) :]
    tasks.append(subprocess.Popen(command, env=os.environ | step, start_new_session=True))
os.write(1, f"tasks {' '.join(str(task.pid) for task in tasks)}\\n".encode())
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
TASK = """
import json, os, signal, sys, time
from distflow_jax.cluster import job
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
found = job.find(os.environ)
told = ["task", found.coordinator, found.num_processes, found.process_id, sys.argv[1:]]
os.write(1, f"{json.dumps(told)}\\n".encode())  # at once, not between parts of the other's line
srun = os.getppid()
while sys.argv[1] == "wait" and os.getppid() == srun:
    time.sleep(0.05)
sys.exit(int(sys.argv[1]) if found.process_id else 0)
"""


@pytest.fixture
def batch(tmp_path, capsys, monkeypatch):
    """Starts the batch file of a run of TASK as Slurm would, with programs of ours on PATH."""
    program(tmp_path / "srun", SRUN)
    program(
        tmp_path / "scontrol",
        f"import sys; open({str(tmp_path / 'log')!r}, 'a').write(' '.join(sys.argv[1:]))",
    )
    (tmp_path / "task.py").write_text(TASK)
    started = []

    def start(*arguments):
        flags = ["--nodes=2", "--time=60", f"--directory={tmp_path}"]
        text, _ = dry_run(slurm, flags, capsys, ["task.py", *arguments])
        (tmp_path / "batch").write_text(text)
        process = subprocess.Popen(
            ["bash", "batch"],
            cwd=tmp_path,
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1234"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def requeued(folder):
    log = folder / "log"
    return log.read_text() if log.exists() else ""


def tasks_of(process):
    """Their process ids, once both have said that they run."""
    lines = [process.stdout.readline().split() for _ in range(3)]
    (pids,) = [line[1:] for line in lines if line[0] == "tasks"]
    return [int(pid) for pid in pids]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_batch_file_ends_as_the_run_does(batch, tmp_path, code):
    process = batch(str(code), "it's $HOME")
    output, _ = process.communicate(timeout=HANG)
    assert process.returncode == code
    assert requeued(tmp_path) == ""
    told = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    rest = [str(code), "it's $HOME"]
    port = 61440 + 1234
    assert sorted(told) == [["task", f"n1:{port}", 2, i, rest] for i in range(2)]


def test_sigterm_to_the_tasks_puts_the_job_back(batch, tmp_path):
    process = batch("wait")
    for pid in tasks_of(process):
        os.kill(pid, signal.SIGTERM)
    assert process.wait(HANG) == 75
    assert requeued(tmp_path) == "requeue 1234"


def test_a_cancelled_job_stays_cancelled(batch, tmp_path):
    """scancel signals the batch step too: the shell and srun, which then kills the tasks."""
    process = batch("wait")
    pids = tasks_of(process)
    os.killpg(process.pid, signal.SIGTERM)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert process.wait(HANG) == -signal.SIGTERM
    time.sleep(0.2)
    assert requeued(tmp_path) == ""


@pytest.mark.parametrize(
    "time_limit, seconds",
    [
        ("30", 1800),
        ("10:30", 630),
        ("04:00:00", 14400),
        ("2-12", 216000),
        ("1-02:30", 95400),
        ("1-02:30:15", 95415),
    ],
)
def test_time_limits(time_limit, seconds):
    assert slurm.seconds(time_limit) == seconds
