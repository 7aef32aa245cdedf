"""Schedulers whose cache is too small for all: who makes way, and what is refused."""

import numpy as np
import pytest
from support.tiny_model import TINY, mesh_of, prompt_of
from support.tiny_sampler import (
    CONFIG,
    STOP_IDS,
    Sampler,
    assert_all_free,
    assert_same,
    by_uid,
    drive,
)

from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler

# -- prompts whose responses wait ------------------------------------------------------------------


def overtaken(count=7, samples=3):
    """Each may be longer than the one before, and so goes first."""
    rng = np.random.default_rng(11)
    return [
        GroupRequest(
            prompt_of(700 + i, rng.integers(8, 250, 20)),
            SamplingParams(samples, 4 + i, temperature=1.0),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("cache_tokens", [0, 112])
def test_groups_that_others_overtake_do_not_keep_the_cache_from_them(cache_tokens):
    """With one response each waiting they hold more prompts than the cache has entries for, or
    pages: those last in turn make way, and are put in again."""
    sampler = Sampler(slots=2, group_size=2, max_read=52, cache_tokens=cache_tokens)
    requests = overtaken()
    made = Scheduler(sampler.engine, sampler.params, version=0, state=sampler.state)
    got, most = [], 0
    for request in requests:
        made.submit(request)
        for _ in range(100):  # until its first two are in the slots
            got += made.step()
            here = [held.group.request for held in made._loop.slots.running().values()]
            if len(here) == 2 and all(other is request for other in here):
                break
        most = max(most, len(made._loop.waiting.groups()))
    assert most > 2, "they are to wait side by side"
    got = by_uid(got) | drive(made)
    sampler.state = assert_all_free(made)
    assert len(got) == sum(r.sampling.num_samples for r in requests)
    assert_same(got, by_uid(sampler.run(requests)))


def test_a_cache_that_holds_no_response_is_refused():
    with pytest.raises(ValueError, match="32 leaves 32 .* prompt of 32 .* takes 64"):
        Sampler(cache_tokens=32)
    with pytest.raises(ValueError, match="use at least 256"):
        Sampler((4, 1), cache_tokens=64)


def test_what_cannot_be_read_again_is_not_computed_again():
    mesh = mesh_of(1, 1, names=("data", "tensor"))
    engine = RolloutEngine(TINY, CONFIG, mesh, stop_ids=STOP_IDS, seed=3)
    scheduler = Scheduler(engine, None)
    with pytest.raises(ValueError, match="make the engine with max_read=51, it has 0"):
        scheduler.load(None, 1, cache="recompute")
    assert scheduler.version == 0
