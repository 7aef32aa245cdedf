"""Workers that the local launcher starts: their command, when they begin, and how they end."""

import subprocess
import sys
import time

import pytest
from support.waiting import until

from distflow_jax.commands.launch.local import LocalWorkers, parse_arguments
from distflow_jax.commands.launch.worker_group import worker_command


def test_the_command_of_a_worker_is_that_of_the_run_without_what_is_the_trainers():
    train = ["-P", "-m", "distflow_jax.commands", "train", "--config=tiny", "--workdir=runs/a"]
    assert worker_command([*train, "--config.stream.workers=True", "--profile_steps", "3"]) == [
        *("-P", "-m", "distflow_jax.commands", "worker", "--config=tiny"),
        *("--config.stream.workers=True", "--join=runs/a"),
    ]
    script = ["scripts/train.py", "--workdir", "runs/b", "--config", "tiny"]
    assert worker_command(script) == ["scripts/worker.py", "--config", "tiny", "--join=runs/b"]


def test_workers_need_a_training_run_with_a_folder():
    with pytest.raises(ValueError, match="--workers needs a training run after --"):
        worker_command(["scripts/serve.py", "--config=tiny"])
    with pytest.raises(ValueError, match="--workers needs the run's --workdir"):
        worker_command(["scripts/train.py", "--config=tiny"])
    assert parse_arguments(["--", "train", "--config=tiny"]).worker is None


def test_workers_begin_with_new_addresses_and_end_after_the_run(tmp_path):
    (tmp_path / "task_buffers.json").write_text("of an earlier start")
    told, processes = [], []

    def start(label, command):
        code = "import time; time.sleep(3600)" if label == "w0" else "raise SystemExit(3)"
        processes.append(subprocess.Popen([sys.executable, "-S", "-c", code]))
        return processes[-1]

    workers = LocalWorkers(["x", f"--join={tmp_path}"], 2, start, told.append)
    time.sleep(0.5)
    assert not processes
    (tmp_path / "task_buffers.json").write_text("of this one")
    until(lambda: told)
    assert told == ["worker 1 ended with exit code 3"]
    workers.close(finished=False)
    assert [process.poll() for process in processes] == [-15, 3]
