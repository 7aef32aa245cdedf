"""A reward model, trained by one run, scores beside a rule in another, and both are logged.

Nightly: a trained reward model scores beside a rule in a second run.
"""

import numpy as np
import pytest
from support.run_folders import json_lines
from support.tiny_config import tiny_config

from distflow_jax import run
from distflow_jax.report.run_writer import read_metrics

SMALL = [
    "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=512",
    "data.prompts_per_step=8",
    "rollout.max_response_length=8",
    "rollout.num_slots=16",
    "training.steps=2",
    "checkpoint.every=2",
    "eval.dataset=",
]
GRAPH = """
name: two_rewards
base: ppo
nodes:
- id: judge
  role: REWARD
  type: MODEL_INFERENCE
  deps: [rollout]
  reads: [rows]
  writes: {score: judged}
  options: {checkpoint: JUDGE}
- id: mix
  role: REWARD
  type: COMPUTE
  fn: weighted_sum
  deps: [reward, judge]
  reads: {rule: score, model: judged}
  writes: {score: mixed}
  options: {weights: {rule: 1.0, model: 0.5}}
- id: advantage
  role: ACTOR
  type: COMPUTE
  scope: batch
  deps: [mix, values]
  reads: {score: mixed, value: value, rows: rows}
  writes: [advantage, returns]
"""


def train(folder, *changes):
    config = tiny_config(*SMALL, *changes)
    assert run.train(config, folder) == 0
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.slow
def test_a_trained_reward_model_scores_beside_a_rule(tmp_path):
    trained = train(tmp_path / "judge", "dag=reward_model")
    assert all(row["reward_model/grad_norm"] > 0 for row in trained)
    (tmp_path / "graph.yaml").write_text(GRAPH.replace("JUDGE", str(tmp_path / "judge")))
    rows = train(tmp_path / "run", f"dag={tmp_path}/graph.yaml")
    assert [row["perf/compilations"] for row in rows[1:]] == [0]
    for row in rows:
        samples = json_lines(tmp_path / "run" / "samples" / f"{row['step']}.jsonl")
        assert len(samples) == 8 * 4
        rule, mixed = ([s[name] for s in samples] for name in ("score", "mixed"))
        assert row["reward/rule"] == pytest.approx(np.mean(rule), abs=1e-6)
        judged = (np.array(mixed) - rule) / 0.5
        assert row["reward/model"] == pytest.approx(judged.mean(), rel=1e-4)
        assert judged.std() > 0.1  # it tells responses apart
        # what the advantage is made of, over all responses
        assert row["critic/rewards/mean"] == pytest.approx(np.mean(mixed), rel=1e-4, abs=1e-5)
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
