"""More trajectories than lanes: what waits for the outside is not decoded, and loses nothing.

Nightly: trajectories that wait lose no token: one lane, small reads, guesses, pages that go at
random, shared prefixes, an int8 cache.
"""

import numpy as np
import pytest
from support.parking import park_at_random
from support.tiny_model import TINY, forward_logps, prompt_of
from support.turn_sampler import CONFIG, PARAMS, PROMPTS, Sampler, assert_agree

READ = CONFIG.max_prompt + CONFIG.max_response - 1  # what is parked can be read again
SYSTEM = np.random.default_rng(9).integers(0, TINY.vocab_size, 17)
ALIKE = [
    prompt_of(i, [*SYSTEM, *np.random.default_rng(i).integers(0, TINY.vocab_size, 9)])
    for i in range(4)
]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def roomy():
    """An engine in which nothing waits for a lane, and nothing is read again."""
    return Sampler(slots=16)


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        pytest.param(dict(slots=16, lanes=4), "parked", marks=SLOW),  # by chance alone
        (dict(slots=16, lanes=4, cache_tokens=16 * 14), "parked"),  # pages of one
        pytest.param(
            dict(slots=16, lanes=4, cache_tokens=16 * 24, prefix_tokens=64),
            "prefix_hits",
            marks=SLOW,
        ),
        pytest.param(dict(slots=8, lanes=2, max_read=0), "tokens", marks=SLOW),
        pytest.param(dict(slots=16, lanes=1), "parked", marks=SLOW),
        pytest.param(dict(slots=16), "parked", marks=SLOW),
        pytest.param(dict(slots=16, lanes=4, prefill_tokens=16), "prefills", marks=SLOW),
        pytest.param(
            dict(slots=16, lanes=4, speculative_tokens=2, speculative_ngram=1, max_forced=4),
            "proposed",
            marks=SLOW,
        ),
    ],
    ids=str,
)
def test_responses_are_those_of_trajectories_that_never_wait(roomy, changes, counted):
    """When tools answer, and which pages go meanwhile, changes no token before a near-tie."""
    sampler, times = Sampler(**dict(max_read=READ) | changes), 0
    prompts = ALIKE if counted == "prefix_hits" else PROMPTS
    wanted = roomy.run("Parrot", prompts=prompts)
    for chance, delay in ((0.0, 0.02), (0.3, 0.0), (0.5, 0.02)):
        with pytest.MonkeyPatch.context() as patch:
            if sampler.engine.config.max_read:
                park_at_random(patch, chance)
            assert_agree(sampler.run("Parrot", prompts=prompts, delay=delay), wanted)
        times += getattr(sampler.stats, counted)
        assert sampler.stats.occupancy.ended == len(wanted)
    assert times > 0


@pytest.mark.slow
def test_an_int8_cache_stays_as_near_to_the_network():
    """Keys of 8 bits are read from the cache where they are decoded, and are not yet rounded where
    a row is read at once. So tokens differ, and log-probs are as far from the network's as they
    were: those of preempted responses are, too."""
    gaps = {}
    for lanes in (16, 4):
        sampler = Sampler(slots=16, lanes=lanes, cache_dtype="int8", max_read=READ)
        with pytest.MonkeyPatch.context() as patch:
            if lanes == 4:
                park_at_random(patch, 0.6)
            episodes = sampler.run("Parrot").values()
        responses = [episode.response for episode in episodes]
        (whole,) = forward_logps(TINY, [PARAMS], responses, rows=16, row_tokens=256)
        gaps[lanes] = np.concatenate(
            [np.abs(e.response.logp - x)[e.mask] for e, x in zip(episodes, whole, strict=True)]
        )
    assert sampler.stats.parked > 4
    assert gaps[4].mean() < 1.3 * gaps[16].mean() < 0.02
    assert gaps[4].max() < 2 * gaps[16].max() < 0.2
