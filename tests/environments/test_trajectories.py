"""More trajectories than lanes: what waits for the outside is not decoded, and loses nothing."""

import numpy as np
import pytest
from support.parking import park_at_random
from support.turn_sampler import CONFIG, Sampler, assert_agree

READ = CONFIG.max_prompt + CONFIG.max_response - 1  # what is parked can be read again
EIGHT_BIT_GAP = 0.02  # of log-probs: keys that are read again have other roundings before them


@pytest.fixture(scope="module")
def wanted():
    """Episodes of an engine in which nothing waits for a lane, and nothing is read again."""
    return Sampler(slots=16).run("Parrot")


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        (dict(slots=16, lanes=4), "parked"),  # by chance alone
        pytest.param(dict(slots=8, lanes=2, max_read=0), "tokens", marks=pytest.mark.slow),
        pytest.param(dict(slots=16, lanes=1), "parked", marks=pytest.mark.slow),
        pytest.param(dict(slots=16), "parked", marks=pytest.mark.slow),
        (dict(slots=16, lanes=4, cache_tokens=16 * 20), "preempted"),
        (dict(slots=16, lanes=4, prefix_tokens=64, cache_tokens=16 * 24), "prefix_hits"),
        pytest.param(
            dict(slots=16, lanes=4, speculative_tokens=2, speculative_ngram=1, max_forced=4),
            "accepted",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(slots=16, lanes=8, page_size=8, prefill_tokens=16, cache_tokens=16 * 24),
            "preempted",
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_responses_are_those_of_trajectories_that_never_wait(wanted, changes, counted):
    """When tools answer, and which pages go meanwhile, changes no token before a near-tie."""
    sampler = Sampler(**dict(max_read=READ) | changes)
    for chance, delay in ((0.0, 0.02), (0.3, 0.0), (0.5, 0.02)):
        with pytest.MonkeyPatch.context() as patch:
            if chance and sampler.engine.config.max_read:
                park_at_random(patch, chance)
            assert_agree(sampler.run("Parrot", delay=delay), wanted)
    assert getattr(sampler.stats, counted) > 0
    assert sampler.stats.occupancy.ended == len(wanted)


def test_without_a_wait_no_bit_changes(wanted):
    """As many lanes as slots, or lanes for all that are under way."""
    found = Sampler(slots=16, lanes=16, max_read=READ).run("Parrot")
    for uid, episode in wanted.items():
        for name in ("tokens", "logp", "margin", "version"):
            mine, theirs = (getattr(e.response, name) for e in (found[uid], episode))
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_an_int8_cache_stays_near_itself():
    """Keys of 8 bits are read from the cache where they are decoded, and are not yet rounded where
    a row is read at once: the log-probs of a response differ by a rounding, as after preemption."""
    wanted = Sampler(slots=16, cache_dtype="int8").run("Parrot")
    sampler = Sampler(slots=16, lanes=4, cache_dtype="int8", max_read=READ)
    with pytest.MonkeyPatch.context() as patch:
        park_at_random(patch)
        found = sampler.run("Parrot")
    assert sampler.stats.parked > 10
    compared = 0
    for uid, episode in found.items():
        mine, theirs = episode.response, wanted[uid].response
        ties = np.flatnonzero(theirs.margin < EIGHT_BIT_GAP)
        end = ties[0] if len(ties) else len(theirs.tokens)
        np.testing.assert_array_equal(mine.tokens[:end], theirs.tokens[:end])
        np.testing.assert_allclose(mine.logp[:end], theirs.logp[:end], atol=EIGHT_BIT_GAP)
        compared += end
    assert compared > 0.5 * sum(len(e.response.tokens) for e in wanted.values())
