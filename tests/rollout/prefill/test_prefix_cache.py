"""Shared prefixes of prompts are read once, and nothing that is sampled shows it.

Nightly: where little is in common, prompts are read again; shared prefixes on several devices.
"""

import dataclasses

import numpy as np
import pytest
from support.compiled_sampler import changed
from support.tiny_model import TINY, mesh_of, prompt_of, random_params
from support.tiny_sampler import (
    CONFIG,
    NEAR_TIE,
    STOP_IDS,
    Sampler,
    assert_all_free,
    assert_same,
    by_uid,
    drive,
    submit_all,
)

from distflow_jax.config.run_config import Config
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.observe.compilations import Compilations
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.prefill.prefill import Prefix, kept_of, widen
from distflow_jax.rollout.prefill.prefix_cache import PrefixCache, shared_length
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler

SIZES = {"max_prompt": 64, "prefill_tokens": 64, "max_read": 84}
OTHER = random_params(TINY, 5)


def tokens_of(seed, length):
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, length).astype(np.int32)


def make_requests(beginning, lengths, *, start=0, samples=2, limit=6):
    """Prompts of one shared prefix and `lengths` tokens of their own; the second greedy."""
    return [
        GroupRequest(
            prompt_of(start + i, np.concatenate([beginning, tokens_of(100 + start + i, length)])),
            SamplingParams(samples, limit, (1.0, 0.0, 0.7)[i % 3]),
        )
        for i, length in enumerate(lengths)
    ]


SYSTEM = tokens_of(0, 37)  # two pages and a bit
REQUESTS = make_requests(SYSTEM, (5, 1, 20, 9, 27, 3))
ALONE = make_requests(tokens_of(1, 3), (20, 50), start=20)


@pytest.fixture(scope="module")
def plain():
    return Sampler(**SIZES)


@pytest.fixture(scope="module")
def sampler():
    return Sampler(**SIZES, prefix_tokens=48)


@pytest.fixture(scope="module")
def responses(plain):
    return by_uid(plain.run(REQUESTS + ALONE))


@pytest.fixture
def scheduler(sampler):
    made = Scheduler(sampler.engine, sampler.params, version=3, state=sampler.state)
    yield made
    sampler.state = assert_all_free(made)


# -- what is kept ----------------------------------------------------------------------------------


def prefix_of(room):
    """Room for so many tokens."""
    array = np.zeros((1, room, 1, 1), np.float32)
    return Prefix(array, array, None, np.int32(0), np.int32(0), np.int32(room))


def test_the_longest_beginning_is_found():
    cache, text = PrefixCache(64), tokens_of(0, 40)
    short, long = (cache.add(1, text[:n], prefix_of(n)) for n in (8, 32))
    assert cache.find(1, text) is long
    assert cache.find(1, text[:33]) is long
    assert cache.find(1, text[:32]) is short, "a prompt goes on after what it begins with"
    assert cache.find(1, text[:8]) is None
    assert cache.find(1, text[1:]) is None


def test_other_weights_find_nothing():
    cache, text = PrefixCache(64), tokens_of(0, 40)
    old = cache.add(1, text[:8], prefix_of(8))
    assert cache.find(2, text) is None
    new = cache.add(2, text[:8], prefix_of(8))
    assert cache.find(2, text) is new and cache.find(1, text) is old
    cache.clear()
    assert cache.find(1, text) is cache.find(2, text) is None and cache.tokens == 0


def test_the_least_recently_used_makes_room():
    cache, texts = PrefixCache(32), [tokens_of(i, 20) for i in range(4)]
    kept = [cache.add(0, text[:10], prefix_of(16)) for text in texts[:2]]
    assert cache.tokens == 32
    assert cache.use(kept[0]) is kept[0].prefix
    cache.add(0, texts[2][:10], prefix_of(16))
    assert [cache.find(0, text) is not None for text in texts] == [True, False, True, False]
    cache.find(0, texts[0])  # looking is not using
    cache.add(0, texts[3][:10], prefix_of(8))
    assert [cache.find(0, text) is not None for text in texts] == [False, False, True, True]
    cache.add(0, texts[3][:10], prefix_of(16))
    assert cache.tokens == 32, "what comes again replaces itself"
    with pytest.raises(ValueError, match="room for 48 tokens is above the cache's 32"):
        cache.add(0, texts[0], prefix_of(48))


# -- what is worth it ------------------------------------------------------------------------------


def saved(prompts, n, known, config):
    """Tokens that are not read where the shared prefix of length n is read apart, said plainly."""
    able = [p for p in prompts if len(p) > n and np.array_equal(p[:n], prompts[0][:n])]
    row = next(size for size in (16, 32, 64, 128) if size >= n)
    return len(able) * (n - known) - row


def test_the_beginning_that_saves_most_is_read():
    config = dataclasses.replace(CONFIG, max_prompt=64, prefill_tokens=64, prefix_tokens=60)
    rng = np.random.default_rng(0)
    chosen = set()
    for _ in range(200):
        text = rng.integers(0, 50, 64)
        prompts = []
        for _ in range(rng.integers(1, 7)):
            prompt = text[: rng.integers(1, 65)].copy()
            prompt[rng.integers(0, 65) :] = 99
            prompts.append(prompt)
        known = int(rng.integers(0, 2)) * min(10, len(prompts[0]) - 1)
        got = shared_length(prompts[0], prompts[1:], known=known, config=config)
        able = range(known + 16, min(60, len(prompts[0]) - 1) + 1)
        # of one prompt alone nothing is saved: the formula says so too
        wanted = max((saved(prompts, n, known, config) for n in able), default=0)
        assert max(wanted, 0) == (saved(prompts, got, known, config) if got else 0)
        chosen.add(got)
    assert 0 in chosen and len(chosen) > 10


@pytest.mark.slow
def test_little_in_common_is_read_again(scheduler, sampler, plain):
    requests = make_requests(SYSTEM[:15], (20, 20, 20))  # less than a page
    submit_all(scheduler, requests)
    got = drive(scheduler)
    assert (scheduler.stats.prefix_hits, scheduler.stats.prefix_tokens) == (0, 0)
    assert_same(got, by_uid(plain.run(requests)))


# -- responses -------------------------------------------------------------------------------------


def test_what_is_sampled_stays(scheduler, responses):
    submit_all(scheduler, REQUESTS + ALONE)
    assert_same(drive(scheduler), responses)
    stats = scheduler.stats
    # 37 in common: 5 more of six prompts are cheaper than a row of 64 in place of one of 32
    assert (stats.prompts, stats.prefix_hits, stats.prefix_tokens) == (8, 6, 6 * 32)


@pytest.mark.parametrize(
    "axes, changes",
    [
        pytest.param((2, 2), {"prefill_tokens": 32}, marks=pytest.mark.slow),
        # shared prefixes and what follows them in pieces; tokens are looked up in whole prompts
        ((1, 1), {"prefill_tokens": 16, "speculative_tokens": 3, "speculative_ngram": 1}),
    ],
)
def test_it_stays_everywhere(axes, changes, responses):
    other = Sampler(axes, **SIZES | {"prefix_tokens": 48} | changes)
    counter = Compilations()
    assert_same(by_uid(other.run(REQUESTS + ALONE)), responses)
    assert counter.take() == 0, counter.names()
    counter.close()
    assert other.stats.prefix_hits >= 6


def test_prompts_after_a_beginning_are_prompts(sampler, plain):
    """Keys, values and logits, of a row of several, are those of the prompts read whole."""
    engine, prompts = sampler.engine, [r.prompt.tokens for r in REQUESTS[:4]]
    kept = engine.prompts.shared_prefix(sampler.params, SYSTEM)
    found = engine.prompts.row(sampler.params, prompts, after=kept)
    assert len({id(prefix.key) for prefix in found}) == 1
    for prompt, prefix in zip(prompts, found, strict=True):
        (whole,) = plain.engine.prompts.row(plain.params, [prompt])
        assert int(prefix.length) == len(prompt)
        np.testing.assert_allclose(prefix.logits[prefix.row], whole.logits[0], atol=1e-4)
        arrays = kept_of(prefix)
        wide = widen(arrays, prefix.offset, prefix.shared, 64)[:2]
        for got, wanted in zip(wide, (whole.key, whole.value), strict=True):
            count = len(prompt)
            np.testing.assert_allclose(got[:, :count], wanted[:, :count], atol=1e-5)


def test_a_prompt_that_comes_later_finds_it(scheduler, responses):
    submit_all(scheduler, REQUESTS[:2])
    got = drive(scheduler)
    rows = scheduler.stats.prefills
    submit_all(scheduler, REQUESTS[2:3])  # alone it would keep nothing
    got |= drive(scheduler)
    assert scheduler.stats.prefix_hits == 3
    assert scheduler.stats.prefills == rows + 1
    assert_same(got, {uid: r for uid, r in responses.items() if uid[0] < 3})


def test_a_response_that_is_gone_on_with_finds_it(scheduler, plain):
    requests = make_requests(SYSTEM, (5, 1), limit=16)
    submit_all(scheduler, requests)
    got, hits = by_uid(scheduler.step()), scheduler.stats.prefix_hits
    partials = scheduler.export()
    assert any(len(partial.tokens) for partial in partials)
    scheduler.restore(partials)
    got |= drive(scheduler)
    assert scheduler.stats.prefix_hits == hits + len(partials)
    assert_same(got, by_uid(plain.run(requests)))


def test_new_weights_read_anew(sampler, scheduler, plain):
    """Prompts of another version, or of other weights with the same number, find nothing cached."""
    other = sampler.engine.load_params(OTHER)
    submit_all(scheduler, REQUESTS[:3])
    drive(scheduler)
    assert scheduler._loop.prefill._shared.tokens > 0
    fresh = Scheduler(plain.engine, other, version=4, state=plain.state)
    submit_all(fresh, REQUESTS[3:])
    wanted = drive(fresh)
    plain.state = assert_all_free(fresh)
    for version in (4, 4, 3):
        scheduler.load(other, version)
        assert scheduler._loop.prefill._shared.tokens == 0
        submit_all(scheduler, REQUESTS[3:])
        assert_same(drive(scheduler), wanted)


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_weights_that_come_while_responses_run(scheduler, sampler, plain, cache):
    """As without shared prefixes: which version reads what does not depend on them."""
    found = []
    for each in (scheduler, Scheduler(plain.engine, plain.params, version=3, state=plain.state)):
        submit_all(each, [changed(r, limit=20) for r in REQUESTS[:2]])
        got = by_uid(each.step())
        each.load(sampler.engine.load_params(OTHER), 4, cache=cache)
        found.append(got | drive(each))
    plain.state = assert_all_free(each)
    assert any(set(r.version) == {3, 4} for r in found[0].values())
    assert_same(*found)


def test_prompts_that_are_given_up(scheduler, responses):
    ids = submit_all(scheduler, REQUESTS)
    got = by_uid(scheduler.step())
    for group in ids[::2]:
        scheduler.abort(group)
    given_up = {REQUESTS[i].prompt.counter for i in range(0, 6, 2)}
    got = {uid: r for uid, r in (got | drive(scheduler)).items() if uid[0] not in given_up}
    again = [REQUESTS[i] for i in range(0, 6, 2)]
    submit_all(scheduler, again)
    got |= drive(scheduler)
    assert_same(got, {uid: r for uid, r in responses.items() if uid[0] < 6})
    assert scheduler.stats.prefix_hits >= 6


@pytest.mark.parametrize("room, most", [(48, 9), (96, 2)])
def test_two_kinds_of_prompts_have_their_rows(scheduler, plain, room, most):
    """Room for both shared prefixes: each is read once. For one: they take turns."""
    requests = REQUESTS + make_requests(tokens_of(9, 40), (5, 12, 3), start=40)
    mixed = [requests[i] for i in (0, 6, 1, 2, 7, 3, 8, 4, 5)]
    scheduler._loop.prefill._shared.budget = room
    read, prefill = [], scheduler.engine.prompts.shared_prefix
    scheduler.engine.prompts.shared_prefix = lambda params, tokens: (
        read.append(tokens.tolist()) or prefill(params, tokens)
    )
    submit_all(scheduler, mixed)
    got = drive(scheduler)
    del scheduler.engine.prompts.shared_prefix
    assert_same(got, by_uid(plain.run(mixed)))
    assert scheduler._loop.prefill._shared.tokens <= room
    assert 2 <= len(read) <= most and len(set(map(tuple, read))) == 2
    assert scheduler.stats.prefix_hits >= len(mixed) - 1


def test_random_lives_compile_nothing(sampler, scheduler, plain):
    rng, counter = np.random.default_rng(0), Compilations()
    texts, got, requests = [tokens_of(i, 64) for i in range(3)], {}, []
    for round in range(12):
        text = texts[rng.integers(3)][: rng.integers(0, 50)]
        requests += make_requests(text, rng.integers(1, 15, 3).tolist(), start=50 + 3 * round)
        submit_all(scheduler, requests[-3:])
        got |= by_uid(scheduler.step())
        if round % 4 == 3:
            scheduler.load(sampler.params, round, cache=("keep", "recompute")[round % 8 == 3])
        if round % 5 == 2:
            scheduler.restore(scheduler.export())
    got |= drive(scheduler)
    assert counter.take() == 0, counter.names()
    counter.close()
    assert scheduler.stats.prefix_hits > 0
    wanted = by_uid(plain.run(requests))
    assert got.keys() == wanted.keys()
    for uid, response in wanted.items():
        ties = np.flatnonzero(response.margin < NEAR_TIE)
        end = ties[0] if len(ties) else len(response.tokens)
        np.testing.assert_array_equal(got[uid].tokens[:end][-3:], response.tokens[:end][-3:])


# -- settings --------------------------------------------------------------------------------------


def test_settings():
    config, model = Config(), DecoderConfig(max_position=2048)
    assert derive_sizes(config, model, Machine(1, 1, 1, "cpu")).engine.prefix_tokens == 0
    rollout = dataclasses.replace(config.rollout, prefix_tokens=100)
    sizes = derive_sizes(
        dataclasses.replace(config, rollout=rollout), model, Machine(1, 1, 1, "cpu")
    )
    assert sizes.engine.prefix_tokens == 100
    rollout = dataclasses.replace(rollout, prefix_tokens=63)
    with pytest.raises(ValueError, match="prefix_tokens 63 must be 0 .* page size of 64"):
        derive_sizes(dataclasses.replace(config, rollout=rollout), model, Machine(1, 1, 1, "cpu"))
    with pytest.raises(ValueError, match="prefix_tokens 15 must be 0 .* page size of 16"):
        mesh = mesh_of(1, 1, names=("data", "tensor"))
        few = dataclasses.replace(CONFIG, prefix_tokens=15)
        RolloutEngine(TINY, few, mesh, stop_ids=STOP_IDS, seed=0)
