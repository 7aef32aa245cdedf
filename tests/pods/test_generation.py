"""The time of sampling: how many decode steps there are, and what one of them takes."""

import dataclasses

import numpy as np
import pytest
from support.presets import traced_pod
from support.tiny_model import TINY

from distflow_jax.models.moe import FEW_TOKENS
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
    assert load.steps == steps_taken([64] * responses, 32)


def test_steps_are_exact_where_all_start_at_once():
    lengths = np.arange(1, 33)
    load = dataclasses.replace(LOAD, mean=lengths.mean(), longest=32)
    assert load.steps == pytest.approx(steps_taken(lengths, 32))


def test_steps_are_close_where_lengths_differ():
    lengths = np.random.default_rng(0).integers(1, 512, 320)
    load = Load(320, 32, 16, lengths.mean(), lengths.max(), 4)
    assert load.steps == pytest.approx(steps_taken(lengths, 32), rel=0.1)


@pytest.mark.parametrize("mean", [1, 16, 32, 48, 64])
@pytest.mark.parametrize("responses", [8, 32, 320])
def test_every_token_is_decoded_once(mean, responses):
    load = dataclasses.replace(LOAD, responses=responses, mean=mean)
    tokens = load.full_steps * load.at_once + load.last_steps * load.last_running
    assert tokens == pytest.approx(responses * mean)
    assert 0 <= load.full_steps and load.last_running <= load.at_once / 2


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
    """Of which each reads the weights as a full step does, and computes half as much."""
    load = dataclasses.replace(LOAD, responses=128, mean=60)
    found = estimate_generation(POD, TINY, ENGINE, 1, load)
    steps = load.last_steps / load.full_steps
    assert (load.last_steps, load.last_running) == (2 * (64 - 60), 16)
    assert found.stragglers.compute / found.full.compute == pytest.approx(steps / 2)
    weights = 2 * num_params(TINY) / POD.chip.memory_bandwidth
    cached = [e.memory - n * weights for e, n in ((found.full, load.full_steps),
                                                  (found.stragglers, load.last_steps))]  # fmt: skip
    assert cached[1] / cached[0] == pytest.approx(steps / 2)


def test_products_and_attention_run_one_after_the_other():
    load = dataclasses.replace(LOAD, responses=4096, slots=4096)
    found = estimate_generation(POD, TINY, ENGINE, 1, load).full
    products, attention, _ = found.parts
    assert products.compute > products.memory and attention.memory > attention.compute
    assert found.total == products.compute + attention.memory
    assert found.total > max(found.compute, found.memory)


def test_of_a_mixture_only_the_experts_of_a_token_multiply():
    mixture = dataclasses.replace(TINY, num_experts=8, experts_per_token=2, family="qwen3_moe")
    dense, sparse = (estimate_generation(POD, m, ENGINE, 1, LOAD) for m in (TINY, mixture))
    assert sparse.full.compute < 2.5 * dense.full.compute
    assert sparse.full.memory > 2 * dense.full.memory  # all of them are read


def test_of_a_mixture_on_tpus_every_expert_multiplies_few_tokens():
    mixture = dataclasses.replace(TINY, num_experts=8, experts_per_token=2, family="qwen3_moe")
    pod = traced_pod("v5e-8")
    # of a data rank, whatever the sampler has in all
    few, many = (
        dataclasses.replace(LOAD, responses=2, slots=slots)
        for slots in (FEW_TOKENS, FEW_TOKENS + 1)
    )
    every, chosen = (estimate_generation(pod, mixture, ENGINE, 1, load) for load in (few, many))
    guessing = dataclasses.replace(ENGINE, speculative_tokens=1)  # two tokens of each slot
    assert estimate_generation(pod, mixture, guessing, 1, few).full == chosen.full
    assert every.full.compute > 2 * chosen.full.compute
    assert every.full.memory > 1.3 * chosen.full.memory  # two tokens have half of the experts
    assert every.prefill == chosen.prefill
