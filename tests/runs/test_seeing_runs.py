"""A run that sees: it trains on drawn pictures, compiles nothing later, and resumes bit for bit.

A frozen tower stays as it was drawn."""

import pathlib
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest

import distflow_jax as df
from distflow_jax.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from distflow_jax.checkpoint.export import run_export
from distflow_jax.commands import generate_command
from distflow_jax.config.config_dict import override
from distflow_jax.config.shipped import open_config
from distflow_jax.report.run_writer import read_metrics

SETTINGS = {
    "mesh.devices": "0:1",
    "data.prompts_per_step": 4,
    "rollout.num_samples": 4,
    "eval.num_prompts": 8,
    "checkpoint.every": 2,
    "algorithm.entropy_coef": 0.01,  # a gradient where no answer is right yet
}


def train(folder: pathlib.Path, steps: int, **settings):
    config = df.load_config("vision_tiny", SETTINGS | {"training.steps": steps} | settings)
    df.train(config, str(folder))
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]


@pytest.mark.slow
def test_a_run_that_sees_resumes_bit_for_bit(tmp_path):
    whole = train(tmp_path / "whole", 4)
    train(tmp_path / "cut", 2)
    cut = train(tmp_path / "cut", 4)
    named = ("actor/loss", "actor/grad_norm", "critic/score/mean", "perf/images_encoded")
    for step in (3, 4):
        one, two = ([m for m in x if m["step"] == step][-1] for x in (whole, cut))
        assert [one[name] for name in named] == [two[name] for name in named]
    for metrics in whole:
        assert metrics["data/images"] == 4
        assert 4 <= metrics["perf/images_encoded"] <= 16
        assert np.isfinite(metrics["actor/loss"])
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
    assert [m["perf/compilations"] for m in whole[1:]] == [0, 0, 0]


@pytest.mark.parametrize("freeze", ["vision", pytest.param("none", marks=pytest.mark.slow)])
def test_a_frozen_tower_is_not_trained(tmp_path, freeze):
    """Of the parameters only the tower stays, and the optimizer has no moments for it."""
    changes = {"checkpoint.every": 1, "training.freeze": freeze, "eval.dataset": ""}
    rows = train(tmp_path / "run", 2, **changes)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 and row["data/images"] == 4 for row in rows)
    one, two = (dict(run_export(tmp_path / "run", step=n).export.params()) for n in (1, 2))
    moved = {path for path in one if not np.array_equal(one[path], two[path])}
    tower = {path for path in one if path.startswith("vision/")}
    assert tower and moved >= one.keys() - tower
    assert moved & tower == (set() if freeze == "vision" else tower)
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", CheckpointConfig())
    moments = [x for x in checkpointer.contents(2)[1] if "opt_state" in x and "vision" in x]
    checkpointer.close()
    assert bool(moments) == (freeze == "none")


@pytest.mark.slow
def test_generate_answers_about_a_picture(tmp_path, capsys):
    train(tmp_path / "run", 1)
    rng = np.random.default_rng(0)
    PIL.Image.fromarray(rng.integers(0, 256, (60, 90, 3), np.uint8)).save(tmp_path / "a.png")
    settings = [f"{name}={value}" for name, value in SETTINGS.items()]

    def answer(image="a.png", model="", **changes):
        config = override(open_config("vision_tiny"), [*settings, *([model] if model else [])])
        options = dict(prompt="How many?", file=None, raw=False, samples=2, temperature=1.0)
        options |= dict(top_p=1.0, config=config, run=str(tmp_path / "run"))
        options |= dict(image=str(tmp_path / image))
        capsys.readouterr()
        assert generate_command.main(SimpleNamespace(**options | changes)) == 0
        return capsys.readouterr().out

    for changes in ({}, dict(raw=True)):
        found = answer(**changes)
        assert [found.count(f"--- How many? [{n}]\n") for n in (0, 1, 2)] == [1, 1, 0]
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        answer("b.png")
    with pytest.raises(ValueError, match="has no tower; use a vision model"):
        answer(model="model.source=random:llama?hidden=64&layers=2&heads=4&mlp=96&vocab=272")
