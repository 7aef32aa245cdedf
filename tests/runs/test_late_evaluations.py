"""Swaps at boundaries: evaluations and a region's rounds beside the training, each once."""

import json
import os
import subprocess
import sys

import pytest
from support import haste
from support.delayed_train import REWARD
from support.paths import ROOT

from configs import tiny
from distflow_jax import run
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.report.run_writer import read_metrics

SMALL = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    "data.prompts_per_step=8",
    "rollout.num_slots=24",
    "training.steps=4",
    "training.optimizer.lr=0.003",
    "algorithm.correction=token_tis",
    "eval.every=2",
    "eval.num_prompts=8",
    "eval.temperature=1.0",
    "observe.trackers=()",
    "mesh.devices=0:2",
    "mesh.roles={'ROLLOUT': {'devices': '2:3'}}",
    "flow.swap=boundary",
)


def train(folder, *flags):
    config = from_config_dict(Config, override(tiny.get_config(), [*SMALL, *flags]))
    assert run.train_here(config, folder) == 0


def lines(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


def evaluated(folder):
    """{step: (metrics, responses)} of all evaluations; none has two lines."""
    found = {}
    for row in map(json.loads, lines(folder)):
        step = row["step"]
        if values := {name: x for name, x in row.items() if name.startswith("val-")}:
            assert step not in found
            path = folder / "samples" / f"eval-{step}.jsonl"
            found[step] = values, [json.loads(line) for line in path.read_text().splitlines()]
    return found


def lasting(folder):
    """Metrics by step but those of time and machines."""
    return [
        {name: x for name, x in row.items() if not name.startswith(("timing", "perf/"))}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_an_evaluation_that_was_not_written_is_made_when_the_run_goes_on(tmp_path):
    """By the checkpoint's weights, and with the same numbers; one that is there is not repeated."""
    folder, lag = tmp_path / "run", "flow.max_lag=2"
    train(folder, lag, "training.steps=2")
    before = evaluated(folder)
    assert list(before) == [0, 2]
    path = folder / "metrics.jsonl"
    # what a kill after the checkpoint of step 2 leaves, before its evaluation has ended
    path.write_text("".join(f"{x}\n" for x in lines(folder) if "val-" not in x or '": 0,' in x))
    (folder / "samples" / "eval-2.jsonl").unlink()
    assert list(evaluated(folder)) == [0]
    train(folder, lag)
    after = evaluated(folder)
    assert sorted(after) == [0, 2, 4]
    assert {step: after[step] for step in before} == before
    train(folder, lag, "training.steps=5", "eval.every=5")
    assert sorted(evaluated(folder)) == [0, 2, 4, 5]
    assert {step: evaluated(folder)[step] for step in after} == after


@pytest.mark.slow
def test_models_of_the_training_wait_on_the_host(tmp_path):
    """Beside samplers on devices of their own offload changes no bit."""
    for name in ("none", "idle"):
        train(tmp_path / name, "flow.max_lag=1", "dag=ppo", f"training.offload={name}")
    assert lasting(tmp_path / "none") == lasting(tmp_path / "idle")
    assert evaluated(tmp_path / "none") == evaluated(tmp_path / "idle")
    (plan,) = [(tmp_path / "idle" / "plan.txt").read_text()]
    moves = plan[plan.index("other models wait on the host") :]
    assert "rollout params" not in moves and "rollout cache" not in moves


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("dag", ["grpo", "dapo"])
@pytest.mark.parametrize("lag", [1, 2])
def test_no_bit_depends_on_what_is_late(tmp_path, dag, lag):
    """Two processes whose samplers, rewards and trainers wait at random: the same verdicts cut the
    steps, the same versions answer and are evaluated, and the lines come in the same order."""
    (tmp_path / "reward.py").write_text(REWARD)
    flags = (f"dag={dag}", f"flow.max_lag={lag}", "eval.every=1")
    scored = (f"reward.function={tmp_path / 'reward.py'}:digits", "reward.kwargs={}")
    assignments = [f"--config.{key}" for key in (*SMALL, *flags, *scored)]
    for name, delays in (("first", ""), ("second", "1")):
        launch = ["scripts/launch_local.py", "--processes=2", "--devices_per_process=3", "--"]
        command = ["tests/support/delayed_train.py", "--config=configs/tiny.py"]
        done = subprocess.run(
            [sys.executable, *launch, *command, f"--workdir={tmp_path / name}", *assignments],
            cwd=ROOT,
            env=haste.environment() | ({"DELAYS": delays} if delays else {}),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "DELAYS" not in os.environ
    first, second = tmp_path / "first", tmp_path / "second"
    assert lasting(first) == lasting(second)
    assert evaluated(first) == evaluated(second) and sorted(evaluated(first)) == [0, 1, 2, 3, 4]
    steps = [[json.loads(line)["step"] for line in lines(folder)] for folder in (first, second)]
    assert steps[0] == steps[1]
    samples = [
        {path.name: path.read_text() for path in (folder / "samples").iterdir()}
        for folder in (first, second)
    ]
    assert samples[0] == samples[1]
