"""benchmarks/vision_learning.py runs to its end on right and wrong pictures; a new tower goes from
demonstrations to rewards.

Nightly: the benchmark of a run that sees is run; a new tower goes from demonstrations to rewards.
"""

import importlib
import re

import numpy as np
import pytest
from support.paths import ROOT
from support.programs import finished

from distflow_jax.data.dataset import open_dataset
from distflow_jax.report.run_writer import read_metrics


def output_of(*command):
    """The output of a benchmark, whose goals may be missed: the numbers mean nothing here."""
    done = finished(*command, codes=(0, 1))
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stdout


def test_wrong_pictures_are_those_of_the_next_row(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("vision_learning")
    task = open_dataset("task:shapes?ask=count&size=5")
    benchmark.write_wrong(task, tmp_path / "wrong.parquet")
    wrong = open_dataset(str(tmp_path / "wrong.parquet"))
    assert len(wrong) == len(task) == 5
    for number in range(5):
        mine, other = wrong[number], task[(number + 1) % 5]
        assert mine.prompt == task[number].prompt
        assert (mine.ground_truth, mine.data_source) == (task[number].ground_truth, "shapes")
        np.testing.assert_array_equal(mine.images[0].pixels(), other.images[0].pixels())


@pytest.mark.slow
def test_right_and_wrong_runs_have_a_row_each(tmp_path):
    flags = ["--config.training.steps=2", "--config.data.prompts_per_step=4", "--seeds", "0"]
    shown = output_of("benchmarks/vision_learning.py", f"--workdir={tmp_path}", *flags)
    rows = re.findall(r"^\| (seed0-\w+) \|.*\| [\d.]+ \| (yes|NO) \|$", shown, re.MULTILINE)
    assert [name for name, _ in rows] == ["seed0-right", "seed0-wrong"]


def train(folder, settings):
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    finished(
        "scripts/train.py", "--config=configs/vision_smollm2.py", f"--workdir={folder}", *flags
    )


@pytest.mark.slow
def test_a_text_model_with_a_new_tower_goes_from_demonstrations_to_rewards(tmp_path):
    """configs/vision_smollm2.py with a smaller text model, which is random and trained too: the
    second run has what the first learned, its tower included."""
    text = "random:llama?hidden=64&layers=2&heads=4&kv_heads=2&mlp=96&vocab=272&max_position=512"
    count = "task:shapes?ask=count"  # with answers of a byte
    common = {
        "training.freeze": "none",
        "training.optimizer.warmup_steps": 0,
        "data.max_prompt_length": 192,
        "data.prompts_per_step": 8,
        "data.train": count,
    }
    cold = {"model.source": text, "dag": "sft", "eval.dataset": "", "training.steps": 24}
    cold |= {"training.optimizer.lr": 0.01}
    train(tmp_path / "cold", common | cold)
    finished("scripts/export.py", f"--workdir={tmp_path / 'cold'}", f"--out={tmp_path / 'out'}")
    own = {"model.source": tmp_path / "out", "model.vision": "", "training.steps": 2}
    own |= {"eval.dataset": f"{count}&held_out=1", "eval.num_prompts": 16}
    train(tmp_path / "grpo", common | own)
    loss = [row["actor/nll"] for row in read_metrics(tmp_path / "cold" / "metrics.jsonl")]
    assert len(loss) == 24 and loss[-1] < loss[0] - 2
    grpo = [row for row in read_metrics(tmp_path / "grpo" / "metrics.jsonl") if row["step"]]
    # without the cold start, a response of 4 tokens of 272 is a single number in one of 70,000
    assert [row["data/images"] for row in grpo] == [8, 8]
    assert grpo[0]["response_length/mean"] < 3 and grpo[0]["critic/score/mean"] > 0
