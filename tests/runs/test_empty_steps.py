"""A step for which no group is worth training on changes nothing, says so, and the run goes on."""

import math

import pytest

from configs import tiny
from distflow_jax import run
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.report.run_writer import read_metrics

GRAPH = """
name: two_rounds
base: dapo
nodes: []
regions:
- {nodes: [rollout, reward], until: informative, max_rounds: 2}
"""


@pytest.mark.slow
def test_a_run_whose_reward_is_constant(tmp_path, caplog):
    (tmp_path / "graph.yaml").write_text(GRAPH)
    changes = [
        f"dag={tmp_path}/graph.yaml",
        "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=512",
        "reward.kwargs={'pattern': '.*'}",
        "training.steps=4",  # prompts are dealt by the lengths of two steps before
        "checkpoint.every=4",
        "eval.dataset=",
    ]
    config = from_config_dict(Config, override(tiny.get_config(), changes))
    assert run.train(config, tmp_path / "run") == 0
    warnings = [r.getMessage() for r in caplog.records if "groups are worth" in r.getMessage()]
    assert len(warnings) == 4
    assert "only 0 of 16 groups" in warnings[0]
    assert "this step changes no weights" in warnings[0]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert row["training/groups_missing"] == 16
        assert row["training/nonfinite"] == row["actor/grad_norm"] == 0
        assert not {"critic/score/mean", "response_length/mean"} & set(row)  # of no response
    assert [row["perf/compilations"] for row in rows[1:]] == [0, 0, 0]
    assert (tmp_path / "run" / "report.html").is_file()
