"""Responses that fail beside others which end, over an engine whose answers the test decides."""

import logging

import pytest
from support.scripted_engine import STOP, ScriptedEngine, bad, good
from support.tiny_model import prompt_of

from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.rollout.foreign import foreign_scheduler
from distflow_jax.rollout.foreign.foreign_scheduler import (
    ForeignLimits,
    ForeignScheduler,
    TriesEnded,
)
from distflow_jax.rollout.foreign.foreign_start import ForeignStart
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.sampler import SamplerState

BAD, WELL = 1, 2  # counters of prompts


@pytest.fixture(autouse=True)
def at_once(monkeypatch, caplog):
    """No pauses between tries."""
    monkeypatch.setattr(foreign_scheduler, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(foreign_scheduler, "LEAST_PAUSE", 0.0)
    caplog.set_level(logging.WARNING, "distflow_jax")


def limits(tries=2):
    return ForeignLimits(10, frozenset({STOP}), most_tries=tries)


def request_of(counter, samples=2):
    return GroupRequest(prompt_of(counter, [3, 4]), SamplingParams(samples, 4))


def test_a_response_that_ends_as_another_is_given_up_is_not_lost():
    """As in a worker, which drops the group that was given up and goes on with the others."""
    engine = ScriptedEngine(lambda request: (good, bad)[request.counter == BAD](request))
    start = ForeignStart(engine, limits(tries=1))
    sampler = EpisodeSampler(None, SamplerState("w", 0, None), start=start)
    sampler.submit("bad", request_of(BAD))
    sampler.submit("well", request_of(WELL))
    found = []
    for _ in range(20):
        try:
            found += sampler.round()
        except TriesEnded:
            sampler.resume(*sampler.suspend({"bad"}))
        if not sampler.busy:
            break
    assert [(key, len(episodes)) for key, episodes in found] == [("well", 2)]
    assert engine.asked[WELL, 0] == engine.asked[WELL, 1] == 1
