"""Runs whose samplers are jobs of their own, as processes of scripts/, and what their files say."""

import collections
import itertools
import json

from distflow_jax.report.run_writer import read_metrics
from support.programs import Process, training
from support.run_folders import records
from support.tiny_config import SMALL_AHEAD
from support.waiting import until

PROMPTS, SAMPLES, STEPS = 8, 4, 5
SMALL = (
    *SMALL_AHEAD,
    f"training.steps={STEPS}",
    "eval.dataset=",
    "eval.every=0",
    "observe.report_every=0",
    "checkpoint.every=1",
    "stream.max_staleness=1",
)
WORKERS = (
    "stream.workers=True",
    "stream.save_seconds=0.3",
    "stream.lease_seconds=4",
    "stream.no_workers_seconds=200",
)
BOUNDARY = ("stream.weight_update=boundary",)


def settings(flags):
    """Flags of a small run with workers, and further settings."""
    return [f"--config.{flag}" for flag in (*SMALL, *WORKERS, *flags)]


def trainers(started, folder, flags=(), processes=1, devices=1, environment=None):
    """The trainers, each with so many devices, under the launcher."""
    how = {"processes": processes, "devices": devices}
    command = training(folder, (*SMALL, *WORKERS, *flags), **how)
    started.append(Process(folder.parent / f"{folder.name}.log", command, None, environment))
    return started[-1]


def worker(
    started,
    folder,
    flags=(),
    *,
    orphan=200,
    devices=1,
    own=(),
    join=None,
    environment=None,
    program="scripts/worker.py",
):
    """A worker that joins once the trainers answer; `join`: by what, None: by the folder."""
    await_addresses(folder)
    command = [program, "--config=configs/tiny.py", f"--join={join or folder}"]
    log = folder.parent / f"worker{len(started)}.log"
    command += [f"--orphan_seconds={orphan}", *own, *settings(flags)]
    started.append(Process(log, command, devices, environment))
    return started[-1]


def await_addresses(folder):
    """Addresses of the trainers, once they have written them."""
    until((folder / "task_buffers.json").exists)
    return json.loads((folder / "task_buffers.json").read_text())["buffers"]


def await_ready(one):
    """Waits until this worker has joined."""

    def is_ready():
        assert one.process.poll() is None, one.output()
        return "ready: " in one.log.read_text()

    until(is_ready, one.output)


def check_trained(folder, steps=STEPS, *, exact, staleness=1):
    """Every prompt trained once, in its step, whole, by the versions that may answer it."""
    found = collections.Counter()
    for line in itertools.chain(*records(folder).values()):
        for counter in line["counters"]:
            assert counter // PROMPTS + 1 == line["step"]
        found.update((uid[0], uid[1]) for uid in line["uid"])
        for low, high in line["version"]:
            if exact:
                assert low == high == max(0, line["step"] - 1 - staleness)
            else:
                assert line["step"] - 1 - staleness <= low <= high <= line["step"] - 1
    wanted = {(c, s) for c in range(PROMPTS * steps) for s in range(SAMPLES)}
    assert set(found) == wanted and set(found.values()) == {1}


def check_account(folder):
    """All sampled tokens have an account."""
    last = read_metrics(folder / "metrics.jsonl")[-1]
    names = ("sampled", "trained", "filtered", "lost", "under_way")
    sampled, *parts = (last[f"perf/tokens/{name}"] for name in names)
    assert sampled == sum(parts) > 0
