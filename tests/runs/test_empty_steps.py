"""Steps that change nothing: without a group worth training on, or wholly rejected.

Nightly: steps without any group worth training on change no weights, and the run continues; wholly
rejected ones end it; data that end early end the run after a whole step.
"""

import json
import math

import pytest
from support.tiny_config import tiny_config

from distflow_jax import run
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
    config = tiny_config(*changes)
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


@pytest.mark.slow
def test_data_that_end_before_the_last_step_end_the_run_after_a_whole_one(tmp_path, caplog):
    """Each step takes two rounds of two prompts; the third finds one more, and the fourth none."""
    (tmp_path / "graph.yaml").write_text(GRAPH)
    rows = [json.dumps({"question": f"{n} + 1", "answer": str(n + 1)}) for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    changes = [
        f"dag={tmp_path}/graph.yaml",
        f"data.train={tmp_path}/rows.jsonl",
        "data.epochs=1",
        "data.prompts_per_step=2",
        "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=259",
        "reward.kwargs={'pattern': '.*'}",
        "training.steps=5",
        "eval.dataset=",
    ]
    config = tiny_config(*changes)
    assert run.train_here(config, tmp_path / "run") == 0
    told = "the data ended after step 3 of 5; raise data.epochs for more"
    said = [record.getMessage() for record in caplog.records]
    assert said[-1] == told
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    saved = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert "3" in saved and "4" not in saved


@pytest.mark.slow
def test_a_run_whose_steps_are_wholly_rejected_ends(tmp_path, caplog):
    """Each such step warns. With top-p, equal weights of sampler and trainer reject nothing."""
    changes = [
        "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=512",
        "rollout.top_p=0.9",
        "algorithm.correction=sequence_tis",
        "algorithm.rejection=geometric",
        "training.optimizer.lr=0.0",
        "training.steps=4",
        "training.max_rejected=1",
        "eval.dataset=",
    ]
    config = tiny_config(*changes)
    assert run.train(config, tmp_path / "kept") == 0
    for row in read_metrics(tmp_path / "kept" / "metrics.jsonl"):
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 0
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-2)
        assert row["rollout_corr/kl"] == pytest.approx(0, abs=1e-3)
    assert not [r for r in caplog.records if "left no token" in r.getMessage()]

    changes += ["algorithm.rejection_low=5.0", "algorithm.rejection_high=6.0"]
    config = tiny_config(*changes)
    with pytest.raises(RuntimeError, match="left no token in 2 steps in a row, the last being 2"):
        run.train(config, tmp_path / "rejected")
    rows = read_metrics(tmp_path / "rejected" / "metrics.jsonl")
    assert [row["rollout_corr/kept_weight_max"] for row in rows] == [0, 0]
    assert len([r for r in caplog.records if "left no token" in r.getMessage()]) == 1
