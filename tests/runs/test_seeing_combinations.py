"""Images beside everything else that a run may do: each trains, tower and all, and is counted.

Nightly: images beside adapters, demonstrations, preferences, a critic, partial batches and
replays train the tower, or leave it.
"""

import compare_checkouts
import numpy as np
import pytest

import distflow_jax as df
from distflow_jax import run
from distflow_jax.checkpoint.export import run_export
from distflow_jax.report.run_writer import read_metrics

SETTINGS = {
    "model.source": "random:qwen2_5_vl?hidden=64&layers=2&heads=4&kv_heads=2&mlp=96&vocab=272"
    "&max_position=1024&vision_hidden=32&vision_layers=2&vision_heads=4&patch=4",
    "data.train": "task:shapes?ask=count&sides=24-64&size=200",
    "data.prompts_per_step": 4,
    "data.max_prompt_length": 144,
    "rollout.num_samples": 4,
    "rollout.max_response_length": 4,
    "rollout.num_slots": 8,
    "reward.function": "pattern",
    "reward.kwargs": {"pattern": ".*[0-9].*"},
    "algorithm.entropy_coef": 0.01,
    "eval.dataset": "",
    "mesh.devices": "0:1",
    "training.steps": 2,
    "checkpoint.every": 1,
}
AHEAD = {
    "mesh.roles": {"ROLLOUT": {"devices": "1:2"}},
    "stream.max_staleness": 1,
    "algorithm.correction": "token_tis",
}
PARTIAL_BATCHES = AHEAD | {"stream.partial_batches": "counter", "stream.partial_batch_prompts": 2}
CASES = {
    "lora": {"lora.rank": 4},
    "sft": {"dag": "sft"},
    "dpo": {"dag": "dpo"},
    "reward_model": {"dag": "reward_model"},
    "ppo": {"dag": "ppo"},
    "partial_batches": PARTIAL_BATCHES,
    "ppo in partial batches": PARTIAL_BATCHES | {"dag": "ppo"},
}


def config_of(**changes):
    settings = SETTINGS
    if changes.get("dag") in ("sft", "dpo", "reward_model"):  # read no settings of sampling
        unread = ("rollout.num_", "reward.", "algorithm.")
        settings = {key: value for key, value in SETTINGS.items() if not key.startswith(unread)}
    return df.load_config("vision_tiny", settings | changes)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_images_beside(tmp_path, case):
    df.train(config_of(**CASES[case]), str(tmp_path / "run"))
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["perf/compilations"] == 0
    for row in rows:
        assert 0 < row["data/images"] <= 4
        assert row["perf/images_encoded"] >= row["data/images"]
        assert row.get("training/rollout_probs_diff_max", 0.0) < 1e-3
    one, two = (dict(run_export(tmp_path / "run", step=n).export.params()) for n in (1, 2))
    tower = {path for path in one if "vision/" in path}
    moved = {path for path in one if not np.array_equal(one[path], two[path])}
    assert tower and moved
    assert tower <= moved or case == "lora"
    assert not tower & moved or case != "lora"


@pytest.mark.slow
def test_a_replay_trains_on_the_images_of_the_recording(tmp_path):
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    partial_batches = PARTIAL_BATCHES | {
        "stream.partial_batches": "ready",
        "stream.partial_batch_rows": 4,
        "stream.partial_batch_prompts": 0,
    }
    recording, replay = ({**partial_batches, "stream.record": kept} for kept in (True, False))
    assert run.train_here(config_of(**recording).config, recorded) == 0
    assert run.train_here(config_of(**replay).config, replayed, replay=recorded) == 0
    assert not list(compare_checkouts.differences(recorded, replayed, 0))
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (recorded, replayed)]
    encoded = [[row["perf/images_encoded"] for row in found if row["step"]] for found in rows]
    assert encoded[0] == encoded[1] and min(encoded[0]) >= 4
