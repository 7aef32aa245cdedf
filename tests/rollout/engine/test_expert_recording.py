"""Experts that the sampler records are those that one exact forward pass chooses, however the
tokens came into the cache.

Nightly: recorded experts are those of one exact forward pass, however the tokens came into the
cache.
"""

import dataclasses

import numpy as np
import pytest
from support.compiled_sampler import CompiledSampler, changed
from support.exact_mixture import exact, same_sets
from support.tiny_model import MIXTURE, TINY, mesh_of, prompt_of, random_params
from support.waiting import HANG

from distflow_jax.config.data_config import RewardConfig
from distflow_jax.config.rollout_config import EvalConfig
from distflow_jax.environments.environment import Turn
from distflow_jax.environments.episodes import turn_columns
from distflow_jax.environments.registry import CallLimits, Environments
from distflow_jax.environments.sample_episodes import sample_episodes
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.observe.compilations import Compilations
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rollout.cache_sizing import page_bytes
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.rollout.scheduling.scheduler import Scheduler
from distflow_jax.stages.evaluate import Evaluation

PARAMS, OTHER = random_params(MIXTURE, 2), random_params(MIXTURE, 5)
STOP_IDS = (258, *range(16))  # a response ends after some ten tokens
CONFIG = EngineConfig(
    slots=8,
    max_prompt=32,
    max_response=20,
    max_read=52,
    max_forced=6,
    tokens_per_call=4,
    page_size=16,
    prefill_tokens=32,
    group_size=4,
    record_experts=True,
)


class Sampler(CompiledSampler):
    """Records; after a run nobody is left in its slots."""

    def __init__(self, axes=(1, 1), **changes):
        config = dataclasses.replace(CONFIG, **changes)
        super().__init__(MIXTURE, PARAMS, config, axes=axes, stop_ids=STOP_IDS)

    def scheduler(self):
        return Scheduler(self.engine, self.params, state=self.state)

    def run(self, requests):
        scheduler, found = self.scheduler(), []
        for request in requests:
            scheduler.submit(request)
        while scheduler.busy:
            found += scheduler.step()
        self.close(scheduler)
        self.stats = scheduler.stats
        return found

    def close(self, scheduler):
        """All slots and pages are free, as the scheduler and as the devices see it."""
        self.state = self.engine.change(scheduler.close())
        assert not np.asarray(self.engine.shapes.alive(self.state)).any()
        assert sorted(sum(scheduler._loop.slots.free, [])) == list(range(self.engine.config.slots))


@pytest.fixture(scope="module")
def sampler():
    return Sampler()


def make_requests():
    """Prompts of all lengths, of which some begin alike; four responses to each."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, MIXTURE.vocab_size, 20)
    requests = []
    for i, length in enumerate((3, 30, 17, 32, 1, 26)):
        tokens = rng.integers(0, MIXTURE.vocab_size, length)
        if length > 20:
            tokens[:20] = common
        requests.append(GroupRequest(prompt_of(i, tokens), SamplingParams(4, 20)))
    return requests


REQUESTS = make_requests()


def assert_recorded(responses, params=PARAMS):
    """They are the routers' own, but where float32 cannot tell which is more probable."""
    compared = total = 0
    for response in responses:
        tokens = np.concatenate([response.prompt.tokens, response.tokens])
        recorded = response.routed_experts
        assert recorded.shape == (len(tokens), MIXTURE.num_layers, MIXTURE.experts_per_token)
        assert recorded.dtype == np.int8
        assert (recorded[-1] == -1).all()  # nobody has read the last token
        wanted = exact(MIXTURE, params, tokens)
        clear = (np.minimum.accumulate(wanted.lead, axis=1) > 1e-4)[:-1]
        same = same_sets(recorded[:-1], wanted.own[:-1])
        assert same[clear].all(), (response.prompt.counter, np.argwhere(clear & ~same))
        compared, total = compared + clear.sum(), total + clear.size
    assert compared > 0.9 * total


def test_experts_are_those_of_one_forward_pass(sampler):
    assert_recorded(sampler.run(REQUESTS))
    counter = Compilations()
    assert_recorded(sampler.run(REQUESTS[:2]))
    assert counter.take() == 0, counter.names()
    counter.close()


def test_what_nobody_wants_is_not_read(sampler):
    """Of some requests: their responses are the same without."""
    some = [changed(r, record=i % 2 == 0) for i, r in enumerate(REQUESTS)]
    found, whole = sampler.run(some), sampler.run(REQUESTS)
    by_uid = {(r.prompt.counter, r.sample): r for r in found}
    for response in whole:
        other = by_uid.pop((response.prompt.counter, response.sample))
        np.testing.assert_array_equal(other.tokens, response.tokens)
        assert (other.routed_experts is None) == (response.prompt.counter % 2 == 1)
    assert not by_uid
    assert_recorded([r for r in found if r.routed_experts is not None])


def test_evaluations_read_none(sampler, monkeypatch):
    """In one turn, and in several."""
    monkeypatch.setattr(sampler.engine, "collect", None)
    tokenizer = Tokenizer.byte_level(MIXTURE.vocab_size)
    state = SamplerState(sampler.params, 0, sampler.state)
    sampling = SamplingParams.of_evaluation(EvalConfig(), 20)
    with RewardPool(RewardConfig(function="zero")) as rewards:
        for name in (None, f"{__name__}:Echo"):
            environments = name and Environments(
                name, {}, tokenizer, calls=CallLimits(HANG), max_turns=2
            )
            evaluation = Evaluation(
                sampler.engine,
                tokenizer,
                rewards,
                [REQUESTS[i].prompt for i in (0, 2)],
                sampling,
                own=slice(0, 2),
                environments=environments,
            )
            state, episodes = evaluation.answer(state)
            scored = evaluation.score(episodes)
            assert [len(s.texts) for s in scored] == [1, 1]
    sampler.state = state.decode


EVERYTHING = dict(
    axes=(2, 2),
    prefill_tokens=16,
    prefix_tokens=32,
    speculative_tokens=2,
    page_size=8,
    cache_tokens=160,
)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                EVERYTHING,
                dict(axes=(4, 2)),
                dict(prefill_tokens=512),
                dict(prefix_tokens=32),
                dict(speculative_tokens=2),
                dict(page_size=8, cache_tokens=80),
                dict(slots=16),  # the last ones are decoded by the smaller program
                dict(weights="stacked"),
                dict(attention="reference"),
            )
        ),
    ],
    ids=lambda changes: "all" if changes is EVERYTHING else " ".join(changes),
)
def test_however_tokens_come_into_the_cache(changes):
    """In pieces, after a shared prefix, guessed, put back and read again, on several devices."""
    sampler = Sampler(**changes)
    assert_recorded(sampler.run(REQUESTS))
    stats = sampler.stats
    assert bool(stats.preempted) == ("cache_tokens" in changes)
    assert bool(stats.prefix_hits) == ("prefix_tokens" in changes)
    assert bool(stats.proposed) == ("speculative_tokens" in changes)


@pytest.mark.parametrize("answer", [5, 9])
def test_turns_are_recorded_from_the_first_token_on(sampler, answer):
    """A tool's answer of 5 tokens is fed, one of 9 read anew with all that came before."""
    request = changed(REQUESTS[1], num_samples=2, limit=6, hold=True)
    scheduler = sampler.scheduler()
    group = scheduler.submit(request)

    def drive():
        found = []
        while scheduler.busy:
            found += scheduler.step()
        return found

    turns = {}
    for response in drive():
        assert_recorded([response])
        added = np.arange(40, 40 + answer)
        turns[response.sample] = np.concatenate([response.tokens, added])
        scheduler.held.extend(group, response.sample, added, limit=20)
    second = drive()
    assert len(second) == 2
    for response in second:
        whole = np.concatenate([turns[response.sample], response.tokens])
        assert_recorded([dataclasses.replace(response, tokens=whole)])
        scheduler.held.release(group, response.sample)
    sampler.close(scheduler)


class Echo:
    """Says three tokens first, and two after each turn."""

    def __init__(self, tokenizer):
        pass

    def reset(self, prompt):
        return np.array([50, 51, 52], np.int32)

    def step(self, tokens, text):
        return Turn(np.array([60, 61], np.int32))


def test_conversations_are_recorded_with_all_that_was_said(sampler):
    tokenizer = Tokenizer.byte_level(MIXTURE.vocab_size)
    environments = Environments(
        f"{__name__}:Echo", {}, tokenizer, calls=CallLimits(HANG), max_turns=3
    )
    state, episodes, _ = sample_episodes(
        sampler.engine,
        SamplerState(sampler.params, 0, sampler.state),
        [REQUESTS[i].prompt for i in (0, 2, 4)],
        SamplingParams(4, 20),
        environments,
    )
    sampler.state = state.decode
    assert any(e.turns > 1 for e in episodes)
    assert_recorded([e.response for e in episodes])
    written = turn_columns(episodes)["routed_experts"]
    assert all(x is e.response.routed_experts for x, e in zip(written, episodes, strict=True))


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_after_a_swap_they_are_of_the_weights_that_made_what_is_in_the_cache(sampler, cache):
    request = changed(REQUESTS[3], num_samples=1)
    scheduler = sampler.scheduler()
    scheduler.submit(request)
    found = scheduler.step()
    scheduler.load(sampler.engine.load_params(OTHER), 1, cache=cache)
    while scheduler.busy:
        found += scheduler.step()
    sampler.close(scheduler)
    (response,) = found
    assert set(response.version) == {0, 1}
    prompt = request.prompt.tokens
    own = {
        name: exact(MIXTURE, params, prompt).own
        for name, params in (("old", PARAMS), ("new", OTHER))
    }
    share = {
        name: same_sets(response.routed_experts[: len(prompt)], experts).mean()
        for name, experts in own.items()
    }
    read_by = "old" if cache == "keep" else "new"
    assert share.pop(read_by) > 0.95 and max(share.values()) < 0.5


def test_what_is_recorded_takes_room():
    """A byte for each expert of a token in a layer; nothing where it is off."""
    off = dataclasses.replace(CONFIG, record_experts=False)
    extra = page_bytes(MIXTURE, CONFIG, 1) - page_bytes(MIXTURE, off, 1)
    assert extra == MIXTURE.num_layers * MIXTURE.experts_per_token * CONFIG.page_size
    many = dataclasses.replace(MIXTURE, num_experts=129)
    assert page_bytes(many, CONFIG, 1) - page_bytes(many, off, 1) == 2 * extra


def test_an_engine_that_does_not_record_has_nothing_of_it():
    mesh = mesh_of(1, 1, names=("data", "tensor"))
    off = dataclasses.replace(CONFIG, record_experts=False)
    engine = RolloutEngine(MIXTURE, off, mesh, stop_ids=(), seed=0)
    state = engine.init_decode_state()
    assert state.cache.experts is None and engine.shapes.route is None
    with pytest.raises(ValueError, match=r"got \[0\] and record_experts=False"):
        engine.collect(state, [0])
    with pytest.raises(ValueError, match="family 'llama' has none; use False"):
        RolloutEngine(TINY, CONFIG, mesh, stop_ids=(), seed=0)
