"""Metrics of nodes that run on partial batches are those of the batch."""

import types

import jax
import numpy as np
import pytest
from support.partial_batches import cut, rows_of_groups
from support.ragged import assert_close, draw, pack, random_sequences

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.layout import WEIGHT
from distflow_jax.stages.advantage import build_advantage
from distflow_jax.stages.partial_batch_metrics import merged_metrics, num_sequences

SEQUENCES = random_sequences(0)
PACKED = pack(SEQUENCES, 1, shared=True)
FIELDS = {
    "score": PACKED.per_sequence(np.random.default_rng(2).normal(size=len(SEQUENCES)), np.nan),
    "old_logp": PACKED.tokens(draw(4, SEQUENCES, 0.1, -3), np.nan),
    "ref_logp": PACKED.tokens(draw(5, SEQUENCES, 0.1, -3), np.nan),
}


@pytest.mark.parametrize("partial_batches", [1, 3, 16])
@pytest.mark.parametrize("unscored", [0, 0.6])
def test_partial_batches_of_advantages_tell_what_the_batch_tells(partial_batches, unscored):
    algorithm = AlgorithmConfig(advantage="dr_grpo", kl_coef=0.1, kl_in_reward=True)
    stage = build_advantage(types.SimpleNamespace(algorithm=algorithm, prompts_per_step=8))
    gone = np.random.default_rng(3).random(FIELDS["score"].shape) < unscored
    fields = FIELDS | {"score": np.where(gone, np.nan, FIELDS["score"])}
    _, _, wanted = stage(None, {"rows": PACKED.rows} | fields, {})
    parts = [
        rows_of_groups(PACKED.rows, part_G)
        for part_G in cut(partial_batches, 8, partial_batches=partial_batches)
    ]
    found = [jax.device_get(stage(None, {"rows": rows} | fields, {})[2]) for rows in parts]
    merged = merged_metrics(found, [num_sequences(rows) for rows in parts])
    assert merged.keys() == wanted.keys()
    assert {"critic/rewards/mean", "critic/advantages/min", "actor/reward_kl_penalty"} < set(merged)
    for name, value in wanted.items():
        assert_close(np.float32(merged[name]), value, name)


def test_partial_batches_without_sequences_count_for_nothing():
    values = [{"a/x/mean": float("nan"), "a/x/max": float("-inf")}, {"a/x/mean": 3, "a/x/max": 4}]
    assert merged_metrics(values, [0, 2]) == values[1]
    assert merged_metrics(values[1:] * 2, [0, 0]) == values[1]
    assert merged_metrics([], []) == {}


def test_means_weigh_by_what_they_are_over_and_counts_add_up():
    values = [{"a/mean": x, f"a/mean{WEIGHT}": n, "b/mean": x} for x, n in ((1.0, 9), (0.0, 1))]
    values[1] |= {"b/mean": 4.0, "api_calls": 3}
    merged = merged_metrics([*values, {"api_calls": 2}], [1, 3, 0])
    assert merged == {"a/mean": 0.9, f"a/mean{WEIGHT}": 10, "b/mean": 3.25, "api_calls": 5}
