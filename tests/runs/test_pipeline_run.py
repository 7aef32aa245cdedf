"""A run whose layers are divided over stages, and that goes on where they are not.

Nightly: a run with pipeline stages trains, and continues without them.
"""

import pytest
from support.tiny_config import tiny_config

from distflow_jax import run
from distflow_jax.report.run_writer import read_metrics

SMALL = "random:llama?hidden=32&layers=4&heads=4&kv_heads=2&mlp=64&vocab=512&max_position=256"


def train(folder, *settings):
    settings = [f"model.source={SMALL}", "dag=ppo", "checkpoint.every=1", *settings]
    settings += ["algorithm.kl_coef=0.1", "training.mini_batches=2", "training.row_tokens=128"]
    settings += ["rollout.max_response_length=8", "data.max_prompt_length=96", "eval.dataset="]
    config = tiny_config(*settings)
    assert run.train(config, folder) == 0
    return read_metrics(folder / "metrics.jsonl")


def check(rows):
    assert rows[1]["perf/compilations"] == 0
    for row in rows:
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
        assert row["training/nonfinite"] == 0
        # the sampler has the layers of all stages
        assert row["training/rollout_probs_diff_max"] < 1e-3


@pytest.mark.slow
def test_a_run_with_stages(tmp_path):
    """Actor, critic and reference, of which one has other stages; then all without."""
    roles = "mesh.roles={'CRITIC': {'pipeline': 4, 'tensor': 2}}"
    folder = tmp_path / "run"
    rows = train(folder, "mesh.pipeline=2", "mesh.context=2", roles, "training.steps=2")
    assert rows[0]["perf/pipeline_bubble"] == 3 / 7  # 4 micro-batches through 4 stages
    check(rows)
    rows = train(folder, "training.steps=3")
    assert len(rows) == 3 and rows[2]["training/rollout_probs_diff_max"] < 1e-3


@pytest.mark.slow
def test_a_run_that_goes_twice_round_the_stages(tmp_path):
    rounds = ("training.pipeline_repeats=2", "training.remat=full")
    rows = train(tmp_path / "run", "mesh.pipeline=2", *rounds, "training.steps=2")
    assert rows[0]["perf/pipeline_bubble"] == 1 / 5  # 2 micro-batches, twice through 2 stages
    check(rows)
