"""Guessed tokens: they come faster, and are those of plain decoding.

Nightly: speculated tokens are those of plain decoding, in frequency too, under preemption and
export.
"""

import dataclasses

import jax
import numpy as np
import pytest
from support.compiled_sampler import CompiledSampler, changed
from support.tiny_model import TINY, prompt_of, random_params
from support.tiny_sampler import CONFIG, assert_agree, assert_all_free, by_uid, drive

from distflow_jax.config.run_config import Config
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.observe.compilations import Compilations
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.rollout.engine import ngram_speculation
from distflow_jax.rollout.engine.slot_updates import SlotRequest
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler

SMALL = dataclasses.replace(TINY, vocab_size=24)  # so few tokens that all come back
PARAMS = random_params(SMALL, 2)
STOP_IDS = (5, 17)
MODEL_AND_MACHINE = DecoderConfig(max_position=2048), Machine(1, 1, 1, "cpu")


class Sampler(CompiledSampler):
    """With d guesses a step."""

    def __init__(
        self,
        d=0,
        ngram=1,
        *,
        axes=(1, 1),
        model=SMALL,
        params=PARAMS,
        stop_ids=STOP_IDS,
        **changes,
    ):
        config = dataclasses.replace(
            CONFIG,
            **{"max_response": 40, "max_forced": 6} | changes,
            speculative_tokens=d,
            speculative_ngram=ngram,
        )
        super().__init__(model, params, config, axes=axes, stop_ids=stop_ids)


def make_requests():
    """Prompts that repeat; greedy and sampled, cut by top-k, by top-p, and by short limits."""
    rng = np.random.default_rng(0)
    settings = ((0.0, 0, 1.0), (0.3, 0, 1.0), (1.0, 0, 1.0), (1.0, 3, 1.0), (1.5, 0, 0.7))
    requests = []
    for i, (length, limit) in enumerate(
        zip((32, 3, 17, 16, 1, 9), (40, 40, 7, 33, 40, 1), strict=True)
    ):
        prompt = prompt_of(i, np.resize(rng.integers(0, SMALL.vocab_size, 5), length))
        requests.append(
            GroupRequest(prompt, SamplingParams(4, limit, *settings[i % len(settings)]))
        )
    return requests


REQUESTS = make_requests()


@pytest.fixture(scope="module")
def plain():
    return Sampler(max_read=72)


@pytest.fixture(scope="module")
def responses(plain):
    return plain.run(REQUESTS)


@pytest.fixture(scope="module")
def sampler():
    return Sampler(3, max_read=72, prefill_tokens=32)


# -- looking up ------------------------------------------------------------------------------------


def looked_up(text, ngram, count):
    """`ngram_speculation.propose` for one list, said plainly."""
    for start in range(len(text) - ngram - 1, -1, -1):
        if len(text) >= ngram and text[start : start + ngram] == text[-ngram:]:
            guess = list(text)
            period = len(text) - ngram - start
            for _ in range(count):
                guess.append(guess[-period])
            return guess[len(text) :]
    return None


@pytest.mark.parametrize("ngram", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_what_followed_where_it_stood_last(ngram, count):
    rng = np.random.default_rng(ngram)
    history = rng.integers(0, 3, (200, 17)).astype(np.int32)
    end = rng.integers(1, 18, 200).astype(np.int32)
    guess, known = ngram_speculation.propose(history, end, ngram=ngram, count=count)
    found = 0
    for row, length, mine, is_known in zip(history, end, guess, known, strict=True):
        wanted = looked_up(row[:length].tolist(), ngram, count)
        assert bool(is_known) == (wanted is not None)
        if wanted is not None:
            assert mine.tolist() == wanted
            found += 1
    assert 0 < found < 200


def test_what_is_written_lies_where_it_was_put():
    history, tokens = np.arange(20, dtype=np.int32).reshape(2, 10), np.full((2, 3), 50, np.int32)
    got = ngram_speculation.write(history, tokens, np.int32([1, 8]), np.int32([2, 3]))
    wanted = history.copy()
    wanted[0, 1:3] = wanted[1, 8:] = 50  # what would lie beyond the end is dropped
    np.testing.assert_array_equal(got, wanted)


# -- the same tokens -------------------------------------------------------------------------------


def more(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "d, ngram, changes",
    [
        more(3, 2, {}),
        (7, 1, {"page_size": 8, "tokens_per_call": 2}),  # most guesses cross the end of a page
        more(1, 1, {"slots": 3, "group_size": 2}),
        more(4, 1, {"attention": "reference", "tokens_per_call": 1}),
        more(3, 1, {"axes": (4, 2)}),
        more(3, 1, {"prefill_tokens": 16}),  # most prompts are read in pieces
    ],
)
def test_tokens_are_those_of_plain_decoding(responses, d, ngram, changes):
    other = Sampler(d, ngram, **changes)
    counter = Compilations()
    got = other.run(REQUESTS)
    assert counter.take() == 0, counter.names()
    counter.close()
    assert_agree(got, responses)
    assert 0 < other.stats.accepted < other.stats.proposed
    assert other.stats.tokens == sum(len(r.tokens) for r in got)
    assert {r.finished for r in got} == {True, False}


@pytest.mark.slow
def test_a_cache_that_is_too_small_for_all_slots():
    """Guesses take what room there is; who finds none waits, and the last one in is put back."""
    requests = [changed(REQUESTS[i], limit=40) for i in (0, 2)]
    wanted = Sampler(stop_ids=()).run(requests)
    least = Sampler(6, stop_ids=(), max_read=72, cache_tokens=128)
    got = least.run(requests)
    assert least.stats.preempted > 0 and least.stats.accepted > 0
    assert {len(r.tokens) for r in got} == {40}
    assert_agree(got, wanted)


def test_used_slots_are_as_good_as_new(sampler, responses):
    first = by_uid(sampler.run(REQUESTS))
    again = by_uid(sampler.run(REQUESTS))
    for uid, response in first.items():
        np.testing.assert_array_equal(again[uid].tokens, response.tokens)
        np.testing.assert_array_equal(again[uid].logp, response.logp)
    assert_agree(list(first.values()), responses)


@pytest.mark.slow
def test_export_and_restore(sampler, responses):
    scheduler = Scheduler(sampler.engine, sampler.params, state=sampler.state)
    for request in REQUESTS:
        scheduler.submit(request)
    found = scheduler.step() + scheduler.step()
    partials = scheduler.export()
    assert any(len(p.tokens) for p in partials)
    scheduler.restore(partials)
    assert_agree([*found, *drive(scheduler).values()], responses)
    sampler.state = assert_all_free(scheduler)


@pytest.mark.parametrize(
    "answer", [pytest.param(3, marks=pytest.mark.slow), 5, pytest.param(9, marks=pytest.mark.slow)]
)
def test_a_tools_answer_is_fed(plain, sampler, answer):
    """Several tokens in a step, and guesses after the last of them; 9 are read anew."""
    turns = []
    for one in (plain, sampler):
        scheduler = Scheduler(one.engine, one.params, state=one.state)
        request = changed(REQUESTS[1], limit=9, hold=True)
        group = scheduler.submit(request)
        first = drive(scheduler)
        for _, sample in first:
            scheduler.held.extend(group, sample, np.resize([2, 9, 4], answer), limit=40)
        second = drive(scheduler)
        for _, sample in first:
            scheduler.held.release(group, sample)
        one.state = assert_all_free(scheduler)
        turns.append((first, second))
    assert scheduler.stats.accepted > 0
    for got, wanted in zip(turns[1], turns[0], strict=True):
        assert_agree(list(got.values()), list(wanted.values()))


@pytest.mark.slow
def test_frequencies_are_those_of_the_distribution():
    """Chi-square of 20,000 responses of three tokens against their probabilities."""
    model = dataclasses.replace(SMALL, vocab_size=4)
    other = Sampler(
        3, model=model, params=random_params(model, 4), slots=16, group_size=16, max_response=4
    )
    prompt = prompt_of(0, np.random.default_rng(1).integers(0, 4, 20))
    number = 20_000
    # a limit of 4, of which the last is left out: three that may all be guesses
    got = other.run([GroupRequest(prompt, SamplingParams(number, 4, 1.0))])
    assert other.stats.accepted > number / 4
    seen, p = {}, {}
    for response in got:
        cell = tuple(response.tokens[:3].tolist())
        seen[cell] = seen.get(cell, 0) + 1
        p[cell] = np.exp(response.logp[:3].astype(np.float64).sum())
    rare = [cell for cell in p if p[cell] * number < 5]
    chances = np.array([p[c] for c in p if c not in rare])
    counts = np.array([seen[c] for c in p if c not in rare])
    chances = np.append(chances, 1 - chances.sum())
    counts = np.append(counts, number - counts.sum())
    chi_square = ((counts - number * chances) ** 2 / (number * chances)).sum()
    freedom = len(counts) - 1
    assert freedom > 20
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


# -- faster ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_text_that_repeats_takes_fewer_steps():
    """Each token is followed by itself: all guesses hold, and a step gives 1 + d tokens."""
    params = random_params(TINY, 0)
    layers = params["layers"]
    layers["output"], layers["down"] = (np.zeros_like(layers[n]) for n in ("output", "down"))
    request = GroupRequest(prompt_of(0, [7, 7, 7]), SamplingParams(2, 40, temperature=0.0))
    calls = {}
    for d in (0, 3):
        one = Sampler(d, 2, model=TINY, params=params)
        for response in one.run([request]):
            assert response.tokens.tolist() == [7] * 40
        calls[d] = one.stats.generate_calls
        # the token at the limit is drawn, and never guessed
        assert (one.stats.proposed, one.stats.accepted) == ((2 * 29, 2 * 29) if d else (0, 0))
    assert calls == {0: 10, 3: 3}  # k = 4


# -- what is passed on -----------------------------------------------------------------------------


def test_a_prefix_carries_its_tokens(plain, sampler):
    engine, params, tokens = sampler.engine, sampler.params, REQUESTS[0].prompt.tokens
    (row,) = engine.prompts.row(params, [tokens])
    prefix = engine.prefill(params=params, padded_tokens=tokens[:5], true_length=5)
    prefix = jax.device_put(prefix, engine.get_prefix_destination_sharding())
    prefix = engine.prefill(
        params=params, existing_prefix=prefix, padded_tokens=tokens[5:], true_length=27
    )
    for one in (row, prefix):
        assert one.tokens.shape == (72,)
        np.testing.assert_array_equal(one.tokens[:32], tokens)
    state = engine.insert(prefix, engine.init_decode_state(), 3)
    np.testing.assert_array_equal(state.history[3, :32], tokens)
    (row,) = plain.engine.prompts.row(plain.params, [tokens])
    assert row.tokens is None and plain.state.history is None


def test_result_at_slot(sampler):
    """k steps of up to 1 + d tokens, packed to the front, and what was guessed for them."""
    engine, state = sampler.engine, sampler.engine.init_decode_state()
    (prefix,) = engine.prompts.row(sampler.params, [REQUESTS[0].prompt.tokens])
    state = engine.insert(
        prefix, state, 4, SlotRequest(0, 0, SamplingParams(1, 40, temperature=0.0))
    )
    total = 0
    for _ in range(3):
        going = bool(np.asarray(state.active)[4])
        state, result = engine.generate(sampler.params, state)
        result = result.convert_to_numpy()
        data = result.get_result_at_slot(4)
        assert data.tokens.shape == data.valid.shape == (1, 4 * 4)
        assert result.logp().shape == result.margin().shape == (8, 16)
        count = int(data.valid.sum())
        np.testing.assert_array_equal(data.valid[0], np.arange(16) < count)
        total += count
        assert data.lengths[0] == total
        proposed, accepted = result.speculation()[4]
        assert 0 <= accepted <= proposed <= 3 * 4
        if going and result.active()[4]:
            assert count == 4 + accepted
        assert not result.speculation()[[0, 1, 2, 3, 5, 6, 7]].any()


# -- settings --------------------------------------------------------------------------------------


def test_settings_reach_the_engine():
    config = Config()
    rollout = dataclasses.replace(config.rollout, speculative_tokens=4, speculative_ngram=3)
    engine = derive_sizes(dataclasses.replace(config, rollout=rollout), *MODEL_AND_MACHINE).engine
    assert (engine.speculative_tokens, engine.speculative_ngram) == (4, 3)
    rollout = dataclasses.replace(rollout, speculative_tokens=64)
    with pytest.raises(ValueError, match="tokens 64 must be .* below the page size of 64 tokens"):
        derive_sizes(dataclasses.replace(config, rollout=rollout), *MODEL_AND_MACHINE)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="speculative_tokens 16 must be .* page size of 16"):
        Sampler(16)
    with pytest.raises(ValueError, match="speculative_ngram must be at least 1, got 0"):
        Sampler(2, 0)
