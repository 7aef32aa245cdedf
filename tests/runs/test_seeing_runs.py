"""A run that sees: it trains on drawn pictures, compiles nothing later, and resumes bit for bit."""

import pathlib

import numpy as np
import pytest

import distflow_jax as df
from distflow_jax.report.run_writer import read_metrics

SETTINGS = {
    "mesh.devices": "0:1",
    "data.prompts_per_step": 4,
    "rollout.num_samples": 4,
    "eval.num_prompts": 8,
    "checkpoint.every": 2,
}


def train(folder: pathlib.Path, steps: int, **settings):
    config = df.load_config("vision_tiny", SETTINGS | {"training.steps": steps} | settings)
    df.train(config, str(folder))
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.slow
def test_a_run_that_sees_resumes_bit_for_bit(tmp_path):
    whole = train(tmp_path / "whole", 4)
    train(tmp_path / "cut", 2)
    cut = train(tmp_path / "cut", 4)
    named = ("actor/loss", "actor/grad_norm", "critic/score/mean", "perf/images_encoded")
    for step in (3, 4):
        one, two = ([m for m in x if m["training/global_step"] == step][-1] for x in (whole, cut))
        assert [one[name] for name in named] == [two[name] for name in named]
    for metrics in whole:
        assert metrics["data/images"] == 4
        assert 4 <= metrics["perf/images_encoded"] <= 16
        assert np.isfinite(metrics["actor/loss"])
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
    assert [m["perf/compilations"] for m in whole[1:]] == [0, 0, 0]
