"""The version that a token names is that of the weights that gave its log-prob, whatever swaps.

Nightly: the version that a token names gave its log-prob, where pages are short and where tokens
are guessed.
"""

import collections
import dataclasses

import numpy as np
import pytest
from support.compiled_sampler import CompiledSampler
from support.parking import park_at_random
from support.tiny_model import TINY, forward_logps, prompt_of, random_params
from support.turn_sampler import LIMITS, TOKENIZER
from support.waiting import HANG

from distflow_jax.environments.environment import Turn
from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.environments.registry import CallLimits, Environments
from distflow_jax.rollout.engine.engine import EngineConfig
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.sampler import SamplerState

STOP_IDS = (258, *range(8))
ONE_TURN = EngineConfig(
    slots=8,
    max_prompt=64,
    max_response=20,
    tokens_per_call=4,
    page_size=16,
    group_size=4,
    prefill_tokens=64,
    prefix_tokens=48,
    max_read=84,
)
TURNS = EngineConfig(
    slots=8,
    max_prompt=36,
    max_response=LIMITS.response,
    max_read=36 + LIMITS.response,
    tokens_per_call=4,
    page_size=16,
    group_size=4,
)
SYSTEM = np.random.default_rng(0).integers(0, TINY.vocab_size, 37)  # two pages and a bit
WEIGHTS = [random_params(TINY, 30 + version) for version in range(7)]
TOLERANCE = 1e-4


class Echo:
    """Answers a turn with its tokens and as many more, which take several decode calls to read."""

    def __init__(self, tokenizer):
        del tokenizer

    def reset(self, prompt):
        del prompt

    def step(self, tokens, text):
        del text
        return Turn([*tokens[-2:0:-1].tolist(), *range(100, 107)])


def requests_of(seed, count, limit, *, system=()):
    """Requests of 3 or 4 responses; every other prompt begins with the tokens `system`."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        own = rng.integers(0, TINY.vocab_size, rng.integers(1, 24))
        tokens = np.concatenate([system, own]) if i % 2 else own
        found.append(GroupRequest(prompt_of(i, tokens), SamplingParams(3 + i % 2, limit)))
    return found


def sample_with_swaps(engine, requests, cache, *, seed, environments=None, calls=(1, 4)):
    """(episodes by request, version held when each request was submitted, prefix hits).

    Requests come two at a time; weights are swapped every few rounds.
    """
    rng = np.random.default_rng(seed)
    state = SamplerState(engine.load_params(WEIGHTS[0]), 0, engine.init_decode_state())
    sampler = EpisodeSampler(engine, state, environments)
    waiting, episodes, submitted = collections.deque(enumerate(requests)), {}, {}
    hits, until_swap = 0, int(rng.integers(*calls, endpoint=True))
    while waiting or sampler.busy:
        for _ in range(2 if waiting and rng.random() < 0.5 else 0):
            if waiting:
                key, request = waiting.popleft()
                sampler.submit(key, request)
                submitted[key] = sampler.version
        if sampler._scheduler is not None:
            hits = max(hits, sampler._scheduler.stats.prefix_hits)
        episodes |= dict(sampler.round())
        until_swap -= 1
        if until_swap <= 0 and sampler.version + 1 < len(WEIGHTS):
            version = sampler.version + 1
            sampler.drain()
            sampler.load(engine.load_params(WEIGHTS[version]), version, cache=cache)
            until_swap = int(rng.integers(*calls, endpoint=True))
    sampler.close()
    return episodes, submitted, hits


def check_versions(episodes, submitted, *, all_exact):
    """Tokens' log-probs are those of one forward pass by their versions: all, or those sampled
    before the first swap since their group's prompt was read. Returns the largest gap of others."""
    whole = [episode for key in sorted(episodes) for episode in episodes[key]]
    responses = [episode.response for episode in whole]
    passes = forward_logps(TINY, WEIGHTS, responses, rows=16, row_tokens=256)
    exact, gap, at = collections.Counter(), 0.0, 0
    for key in sorted(episodes):
        masks = [e.mask for e in episodes[key]]
        versions = [e.response.version for e in episodes[key]]
        read_by = min(v[m].min() for v, m in zip(versions, masks, strict=True))
        assert read_by >= submitted[key], "begun by weights that were gone"
        for version, mask in zip(versions, masks, strict=True):
            assert (np.diff(version[mask]) >= 0).all()
            wanted = np.choose(version, [p[at] for p in passes])
            error = np.abs(responses[at].logp - wanted)
            sure = mask & (all_exact | (version == read_by))
            assert error[sure].max(initial=0) < TOLERANCE, (key, error[sure], version[sure])
            exact.update(version[sure].tolist())
            gap = max(gap, error[mask & ~sure].max(initial=0))
            at += 1
    assert len(exact) > 1, exact  # how many depends on when environments answer
    return gap


def engine_of(config):
    return CompiledSampler(TINY, WEIGHTS[0], config, stop_ids=STOP_IDS, tokenizer=TOKENIZER).engine


@pytest.fixture(scope="module")
def engine():
    return engine_of(ONE_TURN)


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_log_probs_are_those_of_the_versions_named(engine, cache):
    """Also after a shared prefix, of which a group that begins later never uses older keys."""
    requests = requests_of(1, 16, 20, system=SYSTEM)
    episodes, submitted, hits = sample_with_swaps(engine, requests, cache, seed=0)
    assert hits
    gap = check_versions(episodes, submitted, all_exact=cache == "recompute")
    assert (gap > 100 * TOLERANCE) == (cache == "keep")  # older keys do show


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["keep", "recompute"])
@pytest.mark.parametrize("changes", [{"cache_tokens": 192}, {"speculative_tokens": 2}], ids=str)
def test_log_probs_where_pages_are_short_or_tokens_guessed(changes, cache):
    """Slots that wait for a page have a token that newer weights read; some are preempted."""
    engine = engine_of(dataclasses.replace(ONE_TURN, **changes))
    for seed in range(4):
        requests = requests_of(seed, 16, 20, system=SYSTEM)
        episodes, submitted, _ = sample_with_swaps(engine, requests, cache, seed=seed)
        check_versions(episodes, submitted, all_exact=cache == "recompute")


@pytest.mark.parametrize(
    ("changes", "cache"),
    [
        ({}, "keep"),
        pytest.param({}, "recompute", marks=pytest.mark.slow),
        pytest.param({"slots": 16, "lanes": 4}, "keep", marks=pytest.mark.slow),
        pytest.param({"slots": 16, "lanes": 4}, "recompute", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_turns_name_the_versions_too(changes, cache, monkeypatch):
    """Weights change while responses wait for their environments, and while they read answers.

    With keep what is parked is read again by the newest weights, in front of tokens that older ones
    sampled. With recompute all keys are those of the weights that sample.
    """
    if changes:
        park_at_random(monkeypatch)
    environments = Environments(
        f"{__name__}:Echo",
        {},
        TOKENIZER,
        calls=CallLimits(HANG),
        turn_length=LIMITS.turn,
        max_turns=LIMITS.turns,
    )
    requests = requests_of(2, 12, LIMITS.response)
    engine = engine_of(dataclasses.replace(TURNS, **changes))
    episodes, submitted, _ = sample_with_swaps(
        engine, requests, cache, seed=0, environments=environments, calls=(4, 12)
    )
    assert sum(e.turns > 1 for found in episodes.values() for e in found) > 12
    check_versions(episodes, submitted, all_exact=cache == "recompute")
