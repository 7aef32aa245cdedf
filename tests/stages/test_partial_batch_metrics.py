"""Metrics of nodes that run on partial batches are those of the batch."""

import types

import jax
import numpy as np
import pytest
from support.partial_batches import cut, rows_of_groups
from support.ragged import assert_close, draw, pack, random_sequences

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.stages.advantage import build_advantage
from distflow_jax.stages.partial_batch_metrics import (
    PartialBatchSize,
    merged_metrics,
    partial_batch_size,
)

SEQUENCES = random_sequences(0)
PACKED = pack(SEQUENCES, 1, shared=True)
FIELDS = {
    "score": PACKED.per_sequence(np.random.default_rng(2).normal(size=len(SEQUENCES)), np.nan),
    "old_logp": PACKED.tokens(draw(4, SEQUENCES, 0.1, -3), np.nan),
    "ref_logp": PACKED.tokens(draw(5, SEQUENCES, 0.1, -3), np.nan),
}


@pytest.mark.parametrize("partial_batches", [1, 3, 16])
def test_partial_batches_of_advantages_tell_what_the_batch_tells(partial_batches):
    algorithm = AlgorithmConfig(advantage="dr_grpo", kl_coef=0.1, kl_in_reward=True)
    stage = build_advantage(types.SimpleNamespace(algorithm=algorithm, prompts_per_step=8))
    _, _, wanted = stage(None, {"rows": PACKED.rows} | FIELDS, {})
    parts = [
        rows_of_groups(PACKED.rows, part_G)
        for part_G in cut(partial_batches, 8, partial_batches=partial_batches)
    ]
    found = [jax.device_get(stage(None, {"rows": rows} | FIELDS, {})[2]) for rows in parts]
    merged = merged_metrics(found, [partial_batch_size(rows) for rows in parts])
    assert merged.keys() == wanted.keys()
    assert {"critic/rewards/mean", "critic/advantages/min", "actor/reward_kl_penalty"} < set(merged)
    for name, value in wanted.items():
        assert_close(np.float32(merged[name]), value, name)


def test_partial_batches_without_sequences_count_for_nothing():
    empty, one = PartialBatchSize(0, 0), PartialBatchSize(6, 2)
    values = [{"a/x/mean": float("nan"), "a/x/max": float("-inf")}, {"a/x/mean": 3, "a/x/max": 4}]
    assert merged_metrics(values, [empty, one]) == values[1]
    assert merged_metrics(values[1:] * 2, [empty, empty]) == values[1]
    assert merged_metrics([], []) == {}


def test_means_over_tokens_weigh_by_tokens_behind_a_prefix_too():
    sizes = [PartialBatchSize(tokens=9, sequences=1), PartialBatchSize(tokens=1, sequences=1)]
    values = [{"n/critic/returns/mean": x, "n/critic/rewards/mean": x} for x in (1.0, 0.0)]
    merged = merged_metrics(values, sizes, "n/")
    assert merged == {"n/critic/returns/mean": 0.9, "n/critic/rewards/mean": 0.5}
    values = [{"critic/returns/mean": x, "critic/critic/returns/mean": x} for x in (1.0, 0.0)]
    merged = merged_metrics(values, sizes, "critic/")  # of a node that is called critic
    assert set(merged.values()) == {0.9}
