"""Runs whose samplers are jobs of their own, as processes of scripts/, and what their files say."""

import collections
import json
import os
import signal
import subprocess
import sys

from distflow_jax.report.run_writer import read_metrics
from support import haste
from support.paths import ROOT
from support.waiting import HANG, until

PROMPTS, SAMPLES, STEPS = 8, 4, 5
SMALL = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    f"data.prompts_per_step={PROMPTS}",
    "rollout.num_slots=24",
    f"training.steps={STEPS}",
    "training.optimizer.lr=0.003",
    "algorithm.correction=token_tis",
    "eval.dataset=",
    "eval.every=0",
    "observe.trackers=()",
    "observe.report_every=0",
    "checkpoint.every=1",
    "flow.max_lag=1",
)
WORKERS = (
    "flow.workers=True",
    "flow.save_seconds=0.3",
    "flow.lease_seconds=4",
    "flow.starved_seconds=200",
)
BOUNDARY = ("flow.swap=boundary",)


class Process:
    """A process of the run, whose output goes to a file."""

    def __init__(self, log, command, devices=None, own=None):
        """`own`: variables of its environment."""
        self.log = log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=haste.environment(devices) | (own or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, seconds=HANG):
        """The exit code; it is killed after so long."""
        try:
            return self.process.wait(seconds)
        finally:
            self.kill()

    def kill(self, number=signal.SIGKILL):
        """Sends a signal to it and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def output(self):
        """The end of what it wrote."""
        return self.log.read_text()[-4000:]

    def await_ready(self):
        """Waits until this worker has joined."""

        def is_ready():
            assert self.process.poll() is None, self.output()
            return "ready: " in self.log.read_text()

        until(is_ready, self.output)


def settings(flags):
    """Flags of a small run with workers, and further settings."""
    return [f"--config.{flag}" for flag in (*SMALL, *WORKERS, *flags)]


def trainers(started, folder, flags=(), processes=1, devices=1, environment=None):
    """The trainers, each with so many devices, under the launcher."""
    launch = ["scripts/launch_local.py", f"--processes={processes}"]
    launch += [f"--devices_per_process={devices}", "--"]
    train = ["scripts/train.py", "--config=configs/tiny.py", f"--workdir={folder}"]
    log = folder.parent / f"{folder.name}.log"
    started.append(Process(log, [*launch, *train, *settings(flags)], None, environment))
    return started[-1]


def worker(
    started, folder, flags=(), *, orphan=200, devices=1, own=(), join=None, environment=None
):
    """A worker that joins once the trainers answer; `join`: by what, None: by the folder."""
    await_doors(folder)
    command = ["scripts/worker.py", "--config=configs/tiny.py", f"--join={join or folder}"]
    log = folder.parent / f"worker{len(started)}.log"
    command += [f"--orphan_seconds={orphan}", *own, *settings(flags)]
    started.append(Process(log, command, devices, environment))
    return started[-1]


def await_doors(folder):
    """Addresses of the trainers, once they have written them."""
    until((folder / "doors.json").exists)
    return json.loads((folder / "doors.json").read_text())["homes"]


def await_step(folder, step, process):
    """Waits until a step's row is written."""
    path = folder / "metrics.jsonl"

    def is_written():
        assert process.process.poll() is None, process.output()
        return path.exists() and max((r["step"] for r in read_metrics(path)), default=0) >= step

    until(is_written, process.output)


def records(folder):
    """Lines of what all processes trained on."""
    paths = sorted((folder / "groups").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def check_trained(folder, steps=STEPS, *, exact, lag=1):
    """Every prompt trained once, in its step, whole, by the versions that may answer it."""
    found = collections.Counter()
    for line in records(folder):
        for counter in line["counters"]:
            assert counter // PROMPTS + 1 == line["step"]
        found.update((uid[0], uid[1]) for uid in line["uid"])
        for low, high in line["version"]:
            if exact:
                assert low == high == max(0, line["step"] - 1 - lag)
            else:
                assert line["step"] - 1 - lag <= low <= high <= line["step"] - 1
    wanted = {(c, s) for c in range(PROMPTS * steps) for s in range(SAMPLES)}
    assert set(found) == wanted and set(found.values()) == {1}


def check_ledger(folder):
    """All sampled tokens have an account."""
    last = read_metrics(folder / "metrics.jsonl")[-1]
    names = ("sampled", "trained", "filtered", "lost", "under_way")
    sampled, *parts = (last[f"perf/tokens/{name}"] for name in names)
    assert sampled == sum(parts) > 0
