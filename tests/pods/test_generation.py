"""The time of sampling: how many decode steps there are, and what one of them takes."""

import dataclasses

import numpy as np
import pytest
from support.tiny_model import TINY

from distflow_jax.models.parameters import num_params
from distflow_jax.pods.generation import Load, estimate_generation
from distflow_jax.pods.topology import open_topology
from distflow_jax.rollout.decode_state import EngineConfig

ENGINE = EngineConfig(slots=32, max_prompt=16, max_response=64, group_size=4, dtype="bfloat16")
POD = open_topology("h100:2x8")
LOAD = Load(responses=32, slots=32, prompt=16, mean=64, longest=64, group=4)


def steps_taken(lengths, slots):
    """Decode steps where each slot takes the next response as soon as it is free."""
    ends = np.zeros(slots)
    for length in lengths:
        ends[ends.argmin()] += length
    return ends.max()


@pytest.mark.parametrize("responses", [8, 32, 64, 320])
def test_steps_are_exact_where_all_are_equally_long(responses):
    load = dataclasses.replace(LOAD, responses=responses)
    steps = load.full_steps + load.last_steps
    assert steps == steps_taken([64] * responses, 32)


def test_steps_are_exact_where_all_start_at_once():
    lengths = np.arange(1, 33)
    load = dataclasses.replace(LOAD, mean=lengths.mean(), longest=32)
    assert load.full_steps + load.last_steps == pytest.approx(steps_taken(lengths, 32))


def test_steps_are_close_where_lengths_differ():
    lengths = np.random.default_rng(0).integers(1, 512, 320)
    load = Load(320, 32, 16, lengths.mean(), lengths.max(), 4)
    assert load.full_steps + load.last_steps == pytest.approx(steps_taken(lengths, 32), rel=0.1)


def test_a_decode_step_reads_the_weights_and_what_is_cached():
    found = estimate_generation(POD, TINY, ENGINE, 1, LOAD)
    token = 2 * 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim
    cached = 32 * 32 + 32 / 4 * 16  # half of each response; a prompt once for all who answer it
    accessed = 2 * num_params(TINY) + cached * token
    assert found.full.memory == pytest.approx(64 * accessed / POD.chip.memory_bandwidth)
    assert found.steps == 64 and found.stragglers.total == 0
    assert found.full.links == {} and found.total == found.prefill.total + found.full.total


def test_a_shared_copy_is_read_faster_and_talks():
    alone, shared = (estimate_generation(POD, TINY, ENGINE, n, LOAD) for n in (1, 2))
    assert shared.full.memory == pytest.approx(alone.full.memory / 2, rel=0.05)
    assert shared.full.compute == pytest.approx(alone.full.compute / 2)
    assert shared.full.exposed > 0 == alone.full.exposed


def test_stragglers_cost_steps_of_few():
    even = estimate_generation(POD, TINY, ENGINE, 1, dataclasses.replace(LOAD, mean=32))
    assert even.steps == 64
    # half of the slots, each with 48 tokens and its prompt of 16, not 16 and the prompt
    products = 2 * num_params(TINY)
    attended = 4 * TINY.num_layers * TINY.num_heads * TINY.head_dim
    wanted = 16 * (products + 64 * attended) / (32 * (products + 32 * attended))
    assert even.stragglers.compute / even.full.compute == pytest.approx(wanted)


def test_of_a_mixture_only_the_experts_of_a_token_multiply():
    mixture = dataclasses.replace(TINY, num_experts=8, experts_per_token=2, family="qwen3_moe")
    dense, sparse = (estimate_generation(POD, m, ENGINE, 1, LOAD) for m in (TINY, mixture))
    assert sparse.full.compute < 2.5 * dense.full.compute
    assert sparse.full.memory > 2 * dense.full.memory  # all of them are read
