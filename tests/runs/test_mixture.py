"""A run that trains a mixture of experts, from its first sample to an exported folder.

Nightly: mixtures of experts learn from what they sample, are exported and sampled again.
"""

import numpy as np
import pytest
from support.documented import unexplained_metrics
from support.tiny_config import tiny_config

from distflow_jax import run
from distflow_jax.checkpoint.export import run_export
from distflow_jax.models.weights.hf_folder import write_hf_folder
from distflow_jax.models.weights.source import open_model
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.runtime.make_engine import make_engine
from distflow_jax.runtime.samplers.standalone_sampler import answer_sizes

SMALL = (
    "random:qwen3_moe?hidden=32&layers=2&heads=4&kv_heads=2&mlp=16&experts=4&active=2&vocab=512"
    "&max_position=512"
)


def test_who_only_answers_records_no_experts():
    """evaluate.py, generate.py and serve.py with the config of a run that replays them."""
    source = open_model(SMALL)
    overrides = [f"model.source={SMALL}", "training.router_replay=True"]
    config = tiny_config(*overrides)
    assert derive_sizes(config, source.config, Machine.current()).engine.record_experts
    assert not make_engine(source, config, answer_sizes(config, source)).config.record_experts


@pytest.mark.slow
@pytest.mark.parametrize(("replay", "expert"), [(False, 1), (True, 1), (True, 4)])
def test_a_mixture_learns_from_what_it_samples(tmp_path, replay, expert):
    config = tiny_config(
        f"model.source={SMALL}",
        "data.prompts_per_step=8",
        "rollout.max_response_length=8",
        "rollout.num_slots=16",
        "training.steps=2",
        "training.balance_coef=0.01",
        "training.mini_batches=2",
        f"training.router_replay={replay}",
        f"mesh.expert={expert}",
        "checkpoint.every=2",
        "eval.dataset=",
    )
    assert run.train(config, tmp_path / "run") == 0
    assert not unexplained_metrics(tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["actor/grad_norm"] > 0
        assert 0.999 < row["actor/balance_loss"] < 2  # 1 is even, E / K the most
        assert 1 / 4 <= row["actor/expert_share_max"] <= 1 / 2
        # the sampler sends tokens to the experts that the trainer sends them to
        assert row["training/rollout_probs_diff_max"] < 1e-3
        assert ("actor/router_mismatch" in row) == replay
        # the first of two updates finds the sampler's weights, the second others
        assert 0 <= row.get("actor/router_mismatch", 0) < 0.2
    assert rows[1]["perf/compilations"] == 0
    found = run_export(tmp_path / "run")
    write_hf_folder(tmp_path / "out", found.export)
    exported = open_model(str(tmp_path / "out"))
    assert exported.config == open_model(SMALL).config
    trained = dict(found.export.params())
    for path, array in exported.params():
        np.testing.assert_array_equal(array, trained[path], err_msg=path)
