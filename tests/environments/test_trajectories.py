"""More trajectories than lanes: what waits for the outside is not decoded, and loses nothing."""

import pytest
from support.turn_sampler import Sampler, assert_agree


@pytest.fixture(scope="module")
def wanted():
    """Episodes of an engine in which nothing waits for a lane."""
    return Sampler(slots=16).run("Parrot")


@pytest.mark.parametrize(
    "changes",
    [
        dict(slots=16, lanes=4),
        dict(slots=16, lanes=1),
        dict(slots=8, lanes=2),
        dict(slots=16, lanes=16),
        dict(slots=16, lanes=4, cache_tokens=16 * 36),
        dict(slots=16, lanes=4, cache_tokens=16 * 24),
        dict(slots=16, lanes=4, cache_dtype="int8", cache_tokens=16 * 36),
        dict(slots=16, lanes=4, prefix_tokens=64, cache_tokens=16 * 36),
    ],
    ids=str,
)
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_responses_are_those_of_trajectories_that_never_wait(wanted, changes, delay):
    sampler = Sampler(**changes)
    found = sampler.run("Parrot", delay=delay)
    if "cache_dtype" in changes:
        assert found.keys() == wanted.keys()
        return
    assert_agree(found, wanted)
    assert sampler.stats.tokens >= sum(int(e.mask.sum()) for e in found.values())
