"""The sampler: JetStream's interface, agreement with one forward pass, and what must not matter.

Nightly: kernels and stacked weights give the tokens of the reference sampler.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import TINY, forward_logp, mesh_of, prompt_of
from support.tiny_sampler import (
    CONFIG,
    PARAMS,
    REQUESTS,
    STOP_IDS,
    TOKENIZER,
    Sampler,
    assert_agree,
    by_uid,
    make_requests,
)

from distflow_jax.observe.compilations import Compilations
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.engine.slot_updates import SlotRequest
from distflow_jax.rollout.engine_interface import Engine, EngineTokenizer, ResultTokens
from distflow_jax.rollout.requests import GroupRequest, SamplingParams

# isort: split
from jetstream.engine import token_utils  # after engine_interface: without seqio


@pytest.fixture(scope="module")
def sampler():
    return Sampler()


@pytest.fixture(scope="module")
def responses(sampler):
    return sampler.run(REQUESTS)


# -- JetStream -------------------------------------------------------------------------------------


def test_is_a_jetstream_engine(sampler):
    engine = sampler.engine
    assert isinstance(engine, Engine)
    assert engine.max_concurrent_decodes == 8 and engine.samples_per_slot == 1
    assert engine.max_prefill_length == 32 and engine.colocated_cpus is None
    assert engine.mesh.axis_names == ("data", "tensor")
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    assert isinstance(tokenizer, EngineTokenizer)
    assert tokenizer.stop_tokens == set(STOP_IDS) and tokenizer.eos_id == STOP_IDS[0]
    ids, length = tokenizer.encode("1 + 2", is_bos=True, max_prefill_length=32, jax_padding=True)
    assert tokenizer.decode(ids.tolist()) == "1 + 2" and length == 5
    assert tokenizer.encode("1 + 2", max_prefill_length=3)[1] == 3


@pytest.mark.parametrize("padding", ["by its tokenizer", "by JetStream"])
def test_driven_as_by_jetstreams_orchestrator(sampler, padding):
    """Step by step what orchestrator.Driver does with a request, for two slots, one later."""
    engine, text = sampler.engine, "12 + 35 ="
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    longest = engine.max_prefill_length
    if padding == "by JetStream":  # to 16, a length of its own
        padded, length = token_utils.pad_tokens(
            TOKENIZER.encode(text), 1, tokenizer.pad_id, is_bos=False, max_prefill_length=longest
        )
    else:
        padded, length = tokenizer.encode(text, is_bos=True, max_prefill_length=longest)
    state, output, complete = engine.init_decode_state(), {}, {}
    for step in range(100):
        if step in (0, 2):
            slot = (2, 5)[step // 2]
            prefix = engine.prefill(params=sampler.params, padded_tokens=padded, true_length=length)
            prefix = jax.device_put(prefix, engine.get_prefix_destination_sharding())
            state = engine.insert(prefix, state, slot=slot)
            jax.tree.map(lambda x: x.delete(), prefix)
            output[slot], complete[slot] = [], np.zeros((engine.samples_per_slot,), np.bool_)
        state, result = engine.generate(sampler.params, state)
        result.copy_to_host_async()
        assert isinstance(result, ResultTokens)
        result = result.convert_to_numpy()
        for slot in output:
            if complete[slot].all():
                continue
            samples, complete[slot] = token_utils.process_result_tokens(
                tokenizer=tokenizer,
                slot=slot,
                slot_max_length=CONFIG.max_response,
                result_tokens=result,
                complete=complete[slot],
            )
            assert len(samples) == 1 and len(samples[0].text) == len(samples[0].token_ids)
            output[slot] += samples[0].token_ids
        if step > 2 and all(c.all() for c in complete.values()):
            break
    # insert without a request takes uid (0, slot), and JetStream keeps the end token to itself
    prompt = prompt_of(0, TOKENIZER.encode(text))
    wanted = sampler.run([GroupRequest(prompt, SamplingParams(6, CONFIG.max_response))])
    for slot, tokens in output.items():
        response = wanted[slot]
        end = len(response.tokens) - response.finished
        assert tokens == response.tokens[:end].tolist()


def test_result_at_slot(sampler):
    """Tokens at the front, as many as are valid, and the length so far."""
    engine, state = sampler.engine, sampler.engine.init_decode_state()
    (prefix,) = engine.prompts.row(sampler.params, [REQUESTS[0].prompt.tokens])
    state = engine.insert(prefix, state, 4, SlotRequest(0, 0, SamplingParams(1, limit=6)))
    counts = []
    for _ in range(3):
        state, result = engine.generate(sampler.params, state)
        result = result.convert_to_numpy()
        data = result.get_result_at_slot(4)
        assert data.tokens.shape == data.valid.shape == (1, CONFIG.tokens_per_call)
        assert data.lengths.shape == (1,)
        counts.append(int(data.valid.sum()))
        np.testing.assert_array_equal(data.valid[0], np.arange(4) < counts[-1])
        assert data.lengths[0] == sum(counts) <= 6
        assert not result.get_result_at_slot(3).valid.any()
        assert result.logp().shape == result.margin().shape == (8, 4)
        assert (result.logp()[4, : counts[-1]] < 0).all()


# -- what it answers -------------------------------------------------------------------------------


def test_log_probs_are_those_of_one_forward_pass(sampler, responses):
    """Prefill + decode block by block, against the trainer's packed rows at each temperature."""
    assert {r.sampling.top_k > 0 for r in REQUESTS} == {False, True}  # log-probs are before the cut
    trained = {t: forward_logp(TINY, PARAMS, responses, t) for t in (0.7, 1.0, 1.3)}
    for i, response in enumerate(responses):
        sampling = REQUESTS[response.prompt.counter].sampling
        temperature = sampling.temperature or 1.0  # greedy reports at 1
        np.testing.assert_allclose(response.logp, trained[temperature][i], atol=1e-4)


def test_end_token_and_limit(responses):
    assert [(r.prompt.counter, r.sample) for r in responses] == [
        (i, s) for i in range(len(REQUESTS)) for s in range(4)
    ]
    for r in responses:
        assert r.finished == (r.tokens[-1] in STOP_IDS)  # the end token is part of the response
        assert not set(r.tokens[:-1]) & set(STOP_IDS)
        limit = REQUESTS[r.prompt.counter].sampling.limit
        assert len(r.tokens) <= limit and (r.finished or len(r.tokens) == limit)
        assert len(r.logp) == len(r.margin) == len(r.tokens)
        assert (r.margin > 0).all() and (r.logp <= 0).all()
    assert {r.finished for r in responses} == {True, False}
    assert len({len(r.tokens) for r in responses}) > 4


def test_greedy_samples_are_equal_and_others_are_not(responses):
    table = by_uid(responses)
    for sample in range(1, 4):
        np.testing.assert_array_equal(table[3, sample].tokens, table[3, 0].tokens)
        assert table[0, sample].tokens.tolist() != table[0, 0].tokens.tolist()


def test_slots_are_refilled(sampler):
    got = sampler.run(make_requests(1))
    assert len(got) == 24 > sampler.engine.max_concurrent_decodes
    assert sampler.stats.prompts == 6  # each once, not once per sample
    assert sampler.stats.tokens == sum(len(r.tokens) for r in got)
    # 24 responses of up to 20 tokens one after another in 3 fillings would take 15 calls
    assert sampler.stats.generate_calls <= 15


def test_used_slots_are_as_good_as_new(sampler, responses):
    """Leftovers of earlier responses in the cache have no effect."""
    sampler.run(make_requests(2, lengths=(32,) * 6))
    again = by_uid(sampler.run(REQUESTS))
    for uid, response in by_uid(responses).items():
        np.testing.assert_array_equal(again[uid].tokens, response.tokens)
        np.testing.assert_array_equal(again[uid].logp, response.logp)


def test_one_prefix_in_many_slots(sampler):
    engine = sampler.engine
    (prefix,) = engine.prompts.row(sampler.params, [REQUESTS[2].prompt.tokens])
    slots, requests = [1, 3, 6], [SlotRequest(2, s, SamplingParams(1, 20, 0.9)) for s in range(3)]
    together = engine.bulk_insert(prefix, engine.init_decode_state(), slots, requests)
    apart = engine.init_decode_state()
    for slot, request in zip(slots, requests, strict=True):
        apart = engine.insert(prefix, apart, slot, request)
    together, one = engine.generate(sampler.params, together)
    apart, other = engine.generate(sampler.params, apart)
    # all but the free pages: apart, the prompt lies there three times
    np.testing.assert_array_equal(one.data[:, :-1], other.data[:, :-1])
    used = [np.asarray(state.cache.owner) < 16 for state in (together, apart)]
    assert used[1].sum() - used[0].sum() == 2 * 2  # of two pages
    assert np.asarray(one.data)[slots, : CONFIG.tokens_per_call].any(axis=1).all()
    free = [0, 2, 4, 5, 7]
    assert not one.convert_to_numpy().data[free, CONFIG.tokens_per_call : 8].any()


# -- what must not matter --------------------------------------------------------------------------


def test_order_of_requests(sampler, responses):
    order = [4, 2, 5, 0, 3, 1]
    got = sampler.run([REQUESTS[i] for i in order])
    assert [r.prompt.counter for r in got] == np.repeat(order, 4).tolist()
    assert_agree(got, responses)


def test_who_shares_the_batch(sampler, responses):
    assert_agree(sampler.run(REQUESTS[1:2]), [r for r in responses if r.prompt.counter == 1])


@pytest.mark.parametrize("cache_dtype", [pytest.param("auto", marks=pytest.mark.slow), "int8"])
def test_what_others_left_in_a_page(cache_dtype):
    """Pages that start full of nan: what lies beyond a response's length is not even multiplied."""
    other = Sampler(cache_dtype=cache_dtype)
    wanted = by_uid(other.run(REQUESTS))

    @jax.jit
    def poison(cache):
        def fill(x):
            floats = jnp.issubdtype(x.dtype, jnp.floating)
            return jnp.full_like(x, jnp.nan if floats else jnp.iinfo(x.dtype).max)

        filled = jax.tree.map(fill, cache)  # owners stay
        return dataclasses.replace(filled, owner=cache.owner, rank=cache.rank)

    state = other.engine.init_decode_state()
    other.state = state.replace(cache=poison(state.cache))
    for uid, response in by_uid(other.run(REQUESTS)).items():
        np.testing.assert_array_equal(response.tokens, wanted[uid].tokens)
        np.testing.assert_array_equal(response.logp, wanted[uid].logp)


def test_number_of_slots_and_tokens_per_call(responses):
    other = Sampler(slots=3, tokens_per_call=7, page_size=64, group_size=2)
    assert_agree(other.run(REQUESTS), responses)


@pytest.mark.parametrize("axes", [pytest.param((1, 1), marks=pytest.mark.slow), (4, 2)])
def test_kernels_give_what_pages_give(responses, axes):
    """The way to the kernels, with the plain form in their place: tables, and a mesh of shards."""
    other = Sampler(axes, attention="reference")
    assert_agree(other.run(REQUESTS), responses)


@pytest.mark.parametrize(
    ("axes", "weights"),
    [
        ((1, 1), "turned"),
        pytest.param((1, 1), "stacked", marks=pytest.mark.slow),
        pytest.param((2, 2), "turned", marks=pytest.mark.slow),
    ],
)
def test_stacked_weights_give_what_weights_apart_give(responses, axes, weights):
    """As TPUs have them: a scan over the layers."""
    other = Sampler(axes, weights=weights)
    assert isinstance(other.params["layers"], dict)
    assert_agree(other.run(REQUESTS), responses)


def test_devices(responses):
    """Slots over 4 data ranks, heads over 2; and its programs, too, are all compiled before."""
    other = Sampler((4, 2), page_size=32)
    assert len(other.params["layers"][0]["query"].sharding.device_set) == 8
    assert other.params["layers"][0]["query"].addressable_shards[0].data.shape[0] == 2
    ranks, pages = other.state.cache.key.addressable_shards[0].data.shape[1:3]
    assert (ranks, pages) == (1, other.engine.shapes.pages)  # a device's own slots and prompts
    counter = Compilations()
    got = other.run(REQUESTS)
    assert other.engine.programs.temporaries(other.params) > 0
    assert counter.take() == 0, counter.names()
    counter.close()
    assert_agree(got, responses)


def test_compile_leaves_nothing_to_compile(sampler):
    counter = Compilations()
    sampler.state = sampler.engine.init_decode_state()
    for seed in (3, 4):
        lengths = np.random.default_rng(seed).integers(1, 33, 6)
        limits = np.random.default_rng(seed).integers(1, 21, 6)
        sampler.run(make_requests(seed, lengths, limits))
    assert sampler.engine.programs.temporaries(sampler.params) > 0
    assert counter.take() == 0, counter.names()
    counter.close()


# -- errors ----------------------------------------------------------------------------------------


def test_prompts_that_do_not_fit_are_refused(sampler):
    engine, params = sampler.engine, sampler.params
    for length in (0, 33):
        with pytest.raises(ValueError, match=f"1 to 32 tokens, got {length}"):
            engine.prefill(params=params, padded_tokens=np.zeros(64, np.int32), true_length=length)
        request = GroupRequest(prompt_of(0, np.zeros(length, np.int32)), SamplingParams(1, 20))
        with pytest.raises(ValueError, match=f"1 to 32 tokens, got {length}"):
            sampler.run([request])


def test_inserts_that_do_not_fit_are_refused(sampler):
    requests = [SlotRequest(0, i, SamplingParams(1, 4)) for i in range(5)]
    with pytest.raises(ValueError, match="1 to 4 slots with a request each"):
        sampler.engine.bulk_insert(None, sampler.state, list(range(5)), requests)


def test_sizes_that_do_not_fit_are_refused():
    def engine(**changes):
        config = dataclasses.replace(CONFIG, **changes)
        mesh = mesh_of(4, 2, names=("data", "tensor"))
        return RolloutEngine(TINY, config, mesh, stop_ids=(), seed=0)

    with pytest.raises(ValueError, match="slots per process 6 must be divisible by the 4.*use 8"):
        engine(slots=6)
    with pytest.raises(ValueError, match="prompt 32 . response 300 tokens exceed.*256 positions"):
        engine(max_response=300)
    with pytest.raises(ValueError, match="attention must be one of auto, .*got 'flash'"):
        engine(attention="flash")
    with pytest.raises(ValueError, match="without a tokenizer"):
        engine().build_tokenizer(None)
