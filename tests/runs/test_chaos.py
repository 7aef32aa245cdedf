"""Runs with workers under chaos: whatever is killed, stopped or cut off, each prompt trains once.

All is read from the files that trainers write. FOLDER.chaos.log says what happened.

Nightly: workers are killed, stopped, cut off and join, trainers are killed around checkpoints:
every prompt trains once, no token too old.
"""

import os

import numpy as np
import pytest
from support.chaos import Chaos, Plan
from support.tiny_config import SMALL_AHEAD
from support.worker_runs import check_trained

from distflow_jax.report.run_writer import read_metrics

SETTINGS = (
    *SMALL_AHEAD,
    "eval.dataset=",
    "eval.every=0",
    "observe.report_every=0",
    "stream.max_staleness=1",
    "stream.workers=True",
    "stream.save_seconds=0.3",
    "stream.no_workers_seconds=280",
)
# of one group, on two cores that seven processes share; programs of workers that join compile there
GENERATION_SECONDS = 8.0
SOAK_SEED = int(os.environ.get("DISTFLOW_SOAK_SEED", "25"))


def run_chaos(folder, plan, steps, seconds):
    """The run, which has ended well."""
    settings = [
        *SETTINGS,
        f"training.steps={steps}",
        f"checkpoint.every={plan.checkpoints}",
        f"stream.lease_seconds={plan.lease:g}",
    ]
    chaos = Chaos(folder, settings, plan)
    assert chaos.run(seconds) == 0, chaos.output()
    return chaos


def check_rows(chaos, steps):
    """Each step's tokens add up, and none waited for longer than a lease and a group take."""
    rows = [row for row in read_metrics(chaos.folder / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    names = ("trained", "filtered", "lost", "under_way")
    first = {since + i for since in (0, *chaos.restarts) for i in (1, 2)}  # workers begin there
    for row in rows:
        tokens = [row[f"perf/tokens/{name}"] for name in names]
        assert row["perf/tokens/sampled"] == sum(tokens) > 0, row["step"]
        if row["step"] not in first:
            most = chaos.plan.lease + GENERATION_SECONDS
            assert row["timing_s/wait_for_samples"] <= most, row["step"]
    return rows


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_minute_of_chaos(tmp_path):
    plan = Plan(seed=3, every=(4, 8), checkpoints=4, kills=(("in", 8),), lease=3.0)
    steps = 60
    chaos = run_chaos(tmp_path / "run", plan, steps, 400)
    print((tmp_path / "run.chaos.log").read_text())
    check_trained(tmp_path / "run", steps, exact=False)
    check_rows(chaos, steps)
    assert chaos.done["kill trainer in"] == 1 and chaos.done["join"] >= 2
    assert sum(chaos.done.get(kind, 0) for kind in ("kill", "stop", "cut")) >= 3


@pytest.mark.soak
@pytest.mark.multiprocess
def test_a_soak_of_chaos(tmp_path):
    """300 steps, and the reward at their end beside that of a run that nothing happened to."""
    steps, last = 300, 50
    kills = (("before", 60), ("in", 130), ("after", 200))
    plan = Plan(seed=SOAK_SEED, every=(20, 40), checkpoints=10, kills=kills)
    chaos = run_chaos(tmp_path / "run", plan, steps, 7200)
    print((tmp_path / "run.chaos.log").read_text())
    check_trained(tmp_path / "run", steps, exact=False)
    rows = check_rows(chaos, steps)
    assert [chaos.done[f"kill trainer {moment}"] for moment, _ in kills] == [1, 1, 1]
    calm = run_chaos(tmp_path / "calm", Plan(0, (1e9, 1e9), checkpoints=10), steps, 7200)
    ends = [
        np.array([row["critic/score/mean"] for row in found[-last:]])
        for found in (rows, check_rows(calm, steps))
    ]
    error = np.sqrt(sum(end.var(ddof=1) / last for end in ends))
    assert abs(ends[0].mean() - ends[1].mean()) <= 2 * error, [end.mean() for end in ends]
