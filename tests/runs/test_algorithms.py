"""Algorithms of the tables, several at once, through whole runs on the tiny config.

Nightly: losses, corrections and rejections run together, with top-p, and compile once.
"""

import math

import pytest
from support.tiny_config import tiny_config

from distflow_jax import run
from distflow_jax.report.run_writer import read_metrics

SMALL = [
    "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=512",
    "training.steps=3",
    "training.mini_batches=2",
    "rollout.top_p=0.9",
    "algorithm.kl_coef=0.01",
    "eval.dataset=",
]
RUNS = {
    "kl_cov": [
        "algorithm.advantage=grpo_passk",
        "algorithm.kl_cov_share=0.1",
        "algorithm.kl_estimator=k1+",
        "algorithm.correction=sequence_mis",
        "algorithm.correction_low=0.1",
        "algorithm.correction_batch_normalize=True",
        "algorithm.rejection=token_k3",
    ],
    "clip_cov": [
        "algorithm.clip_cov_lb=0.01",
        "algorithm.clip_cov_ratio=0.1",
        "algorithm.rejection=seq_max_k2",
    ],
    "dppo_tv": ["algorithm.rejection=seq_sum_k1", "algorithm.norm_adv_by_std_in_grpo=True"],
    "dppo_kl": ["algorithm.correction=token_tis", "algorithm.rejection=token_k1"],
    "gmpo": ["algorithm.correction=token_mis", "algorithm.rejection=seq_max_k3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("policy_loss", RUNS)
def test_a_run_learns_from_every_step_and_compiles_once(policy_loss, tmp_path):
    """Corrections keep what a sampler with top-p has drawn."""
    changes = [*SMALL, f"algorithm.policy_loss={policy_loss}", *RUNS[policy_loss]]
    config = tiny_config(*changes)
    assert run.train(config, tmp_path) == 0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert row["training/nonfinite"] == 0 and row["rollout_corr/kept_weight_max"] > 0
        assert row["actor/grad_norm"] > 0 and abs(row["rollout_corr/kl"]) < 0.1
    assert [row["perf/compilations"] for row in rows[1:]] == [0, 0]
    choosing = policy_loss.endswith("_cov")
    assert ("more forward passes" in (tmp_path / "plan.txt").read_text()) == choosing
