"""Responses that fail beside others which end, over an engine whose answers the test decides."""

import logging
import types

import pytest
from support.scripted_engine import STOP, ScriptedEngine, bad, good
from support.tiny_model import prompt_of

from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.rollout.foreign import foreign_scheduler
from distflow_jax.rollout.foreign.engine_protocol import EngineError
from distflow_jax.rollout.foreign.foreign_scheduler import (
    ForeignLimits,
    ForeignScheduler,
    ForeignStart,
    TriesEnded,
)
from distflow_jax.rollout.foreign.sampler_server_engine import SamplerServiceEngine
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
            sampler.drop({"bad"})
        if not sampler.busy:
            break
    assert [(key, len(episodes)) for key, episodes in found] == [("well", 2)]
    assert engine.asked[WELL, 0] == engine.asked[WELL, 1] == 1


@pytest.mark.parametrize("started", [1.0, None], ids=["says when it began", "does not say"])
def test_a_prompt_that_always_breaks_its_connection_is_named_and_others_lose_no_try(started):
    """Each time the engine is another one afterwards, as one that the prompt has killed."""
    answers = []

    def answer(request):
        if request.counter != BAD:  # others take their time
            return good(request) if len(answers) > 3 * 4 else None
        answers.append(request)
        engine.started = None if started is None else engine.started + 1
        return bad(request, lost=True)

    engine = ScriptedEngine(answer, started=started)
    scheduler = ForeignScheduler(engine, "w", limits(tries=4))
    for counter in (BAD, WELL):
        scheduler.submit(request_of(counter, samples=1))
    with pytest.raises(TriesEnded, match="failed 4 times at response 0 of prompt 1: scripted"):
        for _ in range(100):
            assert not scheduler.step()
    assert len(answers) == 4 and len(engine.loads) == 5
    scheduler.abort(0)
    answers += [None] * 20
    (response,) = [r for _ in range(5) for r in scheduler.step()]
    assert response.prompt.counter == WELL


def test_an_idle_engine_gets_other_weights_of_the_same_version():
    """As after a restart of the run, whose version 9 is not that of the start before."""
    engine = ScriptedEngine(good)
    start = ForeignStart(engine, limits())
    sampler = EpisodeSampler(None, SamplerState("first 9", 9, None), start=start)
    for params, version in (("first 9", 9), ("first 9", 9), ("8", 8), ("other 9", 9)):
        sampler.load(params, version)
        if version == 9:  # nothing is sampled by 8
            sampler.submit(params, request_of(WELL))
            while sampler.busy:
                sampler.round()
    assert engine.loads == [(9, "first 9"), (9, "other 9")]


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"max_prompt": 8, "model": "m"}, "'slots': None"),
        ({"slots": "8", "max_prompt": 8}, "'slots': '8'"),
        ({"slots": 8, "max_prompt": None}, "'max_prompt': None"),
    ],
)
def test_a_status_without_what_is_needed_is_named(facts, named):
    connection = types.SimpleNamespace(status=lambda timeout: facts)
    with pytest.raises(EngineError, match=f"host:1 is no sampler server: its status has .*{named}"):
        SamplerServiceEngine("host:1", connection, None)
