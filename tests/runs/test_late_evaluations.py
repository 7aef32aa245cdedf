"""Weight updates at boundaries: evaluations and a region's rounds beside the training, each
once.

Nightly: with weight updates at the step boundary evaluations, rounds of a region and offload change
no bit, whatever is late.
"""

import json
import os
import pathlib

import pytest
from support import late_rewards
from support.delayed_train import REWARD
from support.programs import train_late
from support.run_folders import json_lines, lasting
from support.tiny_config import SMALL_AHEAD, tiny_config

from distflow_jax import run

SMALL = (
    *SMALL_AHEAD,
    "training.steps=4",
    "eval.every=2",
    "eval.num_prompts=8",
    "eval.temperature=1.0",
    "mesh.devices=0:2",
    "mesh.roles={'ROLLOUT': {'devices': '2:3'}}",
    "stream.weight_update=boundary",
)


def train(folder, *flags):
    config = tiny_config(*SMALL, *flags)
    assert run.train_here(config, folder) == 0


def evaluated(folder):
    """{step: (metrics, responses)} of all evaluations; none has two lines."""
    found = {}
    for row in json_lines(folder / "metrics.jsonl"):
        step = row["step"]
        if values := {name: x for name, x in row.items() if name.startswith("val-")}:
            assert step not in found
            path = folder / "samples" / f"eval-{step}.jsonl"
            found[step] = values, json_lines(path)
    return found


@pytest.mark.slow
def test_an_evaluation_that_was_not_written_is_made_when_the_run_goes_on(tmp_path):
    """By the checkpoint's weights, and with the same numbers; one that is there is not repeated."""
    folder, staleness = tmp_path / "run", "stream.max_staleness=2"
    train(folder, staleness, "training.steps=2")
    before = evaluated(folder)
    assert list(before) == [0, 2]
    path = folder / "metrics.jsonl"
    # what a kill after the checkpoint of step 2 leaves, before its evaluation has ended
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(x for x in lines if "val-" not in x or '"step": 0,' in x))
    (folder / "samples" / "eval-2.jsonl").unlink()
    assert list(evaluated(folder)) == [0]
    train(folder, staleness)
    after = evaluated(folder)
    assert sorted(after) == [0, 2, 4]
    assert {step: after[step] for step in before} == before
    train(folder, staleness, "training.steps=5", "eval.every=5")
    assert sorted(evaluated(folder)) == [0, 2, 4, 5]
    assert {step: evaluated(folder)[step] for step in after} == after


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_that_fails_ends_no_run(tmp_path, caplog, staleness):
    """It has no scores, but the numbers of its failures; each step and the end are saved."""
    rows = [{"prompt": f"{i}?", "ground_truth": "1", "data_source": "judged"} for i in range(8)]
    problems = tmp_path / "judged.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = f"reward.function={pathlib.Path(late_rewards.__file__)}:judges_training"
    flags = [f"stream.max_staleness={staleness}", f"eval.dataset={problems}", judge]
    flags += ["reward.kwargs={}"]
    if not staleness:
        flags += ["mesh.roles={}", "mesh.devices=", "stream.weight_update=in_flight"]
    train(tmp_path / "run", *flags)
    found = evaluated(tmp_path / "run")
    assert sorted(found) == [0, 2, 4]
    responses = 8 * tiny_config(*SMALL, *flags).eval.num_samples
    counts = {"val-aux/judged/reward/errors": responses, "val-aux/judged/reward/timeouts": 0}
    assert all(metrics == counts for metrics, _ in found.values())
    assert "the evaluation after step 4 has no scores" in caplog.text
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()


@pytest.mark.slow
def test_models_of_the_training_wait_on_the_host(tmp_path):
    """Beside samplers on devices of their own offload changes no bit."""
    for name in ("none", "idle"):
        train(tmp_path / name, "stream.max_staleness=1", "dag=ppo", f"training.offload={name}")
    assert lasting(tmp_path / "none") == lasting(tmp_path / "idle")
    assert evaluated(tmp_path / "none") == evaluated(tmp_path / "idle")
    (plan,) = [(tmp_path / "idle" / "plan.txt").read_text()]
    moves = plan[plan.index("other models wait on the host") :]
    assert "rollout params" not in moves and "rollout cache" not in moves


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("dag", ["grpo", "dapo"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_no_bit_depends_on_what_is_late(tmp_path, dag, staleness):
    """Two processes whose samplers, rewards and trainers wait at random: the same filter decisions
    cut the steps, the same versions answer and are evaluated, and the lines come in the same order.
    """
    (tmp_path / "reward.py").write_text(REWARD)
    flags = (f"dag={dag}", f"stream.max_staleness={staleness}", "eval.every=1")
    scored = (f"reward.function={tmp_path / 'reward.py'}:digits", "reward.kwargs={}")
    for name, delays in (("first", ""), ("second", "1")):
        settings = (*SMALL, *flags, *scored)
        train_late(tmp_path / name, settings, delays, processes=2, devices=3)
    assert "DELAYS" not in os.environ
    first, second = tmp_path / "first", tmp_path / "second"
    assert lasting(first) == lasting(second)
    assert evaluated(first) == evaluated(second) and sorted(evaluated(first)) == [0, 1, 2, 3, 4]
    steps = [[row["step"] for row in json_lines(f / "metrics.jsonl")] for f in (first, second)]
    assert steps[0] == steps[1]
    samples = [
        {path.name: path.read_text() for path in (folder / "samples").iterdir()}
        for folder in (first, second)
    ]
    assert samples[0] == samples[1]
