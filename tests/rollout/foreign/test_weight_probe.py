"""Engines that sample with other weights than they were given: each is found, and named."""

import dataclasses
import itertools
import logging
import threading

import numpy as np
import pytest
from support.foreign_engines import FAULTS, limits_of, step_from
from support.in_process_engine import InProcessEngine
from support.tiny_model import TINY, random_params
from support.tiny_sampler import REQUESTS, Sampler
from support.waiting import HANG, until

from distflow_jax.rollout.foreign import foreign_scheduler
from distflow_jax.rollout.foreign.engine_protocol import EngineError, Failure
from distflow_jax.rollout.foreign.foreign_scheduler import WRONG_LOADS, ForeignScheduler, LostEngine
from distflow_jax.rollout.foreign.weight_probe import (
    COUNTER,
    PROMPTS,
    Reading,
    WeightProbe,
    WrongWeights,
)
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.runtime.samplers.own_logp import own_logp

FIRST, OTHER = random_params(TINY, 2), random_params(TINY, 5)
PLAIN = [request for request in REQUESTS if request.sampling.temperature == 1.0]


SECOND = step_from(FIRST, 0.05)


class Engine(InProcessEngine):
    """An engine that loads what a fault makes of the weights; `held`: what it has."""

    updates_in_flight = True

    def __init__(self, engine, held):
        super().__init__(engine)
        self.name, self.held, self.fault, self.loads = "the stub", held, None, 0

    def load(self, params, version, *, cache="keep"):
        self.loads += 1
        taken = params if self.fault is None else self.fault(params, self.held)
        self.held = self.held if self.fault else params
        super().load(taken, version, cache=cache)


@pytest.fixture(scope="module")
def sampler():
    return Sampler()


@pytest.fixture
def engine(sampler, monkeypatch, caplog):
    monkeypatch.setattr(foreign_scheduler, "FIRST_PAUSE", 0.0)
    caplog.set_level(logging.WARNING, "distflow_jax")
    return Engine(sampler.engine, OTHER)


def scheduler_of(engine, sampler, temperature=1.0):
    limits = limits_of(sampler.engine)
    sampling = SamplingParams(4, 30, temperature)
    probe = WeightProbe(limits.responses, own_logp(TINY, temperature), sampling)
    return ForeignScheduler(
        engine, FIRST, limits, lost=LostEngine(engine, limits.lost_seconds, probe)
    )


def drive(scheduler):
    found = []

    def is_done():
        found.extend(scheduler.step())
        return not scheduler.busy

    until(is_done, pause=0.0)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_an_engine_that_loads_what_it_is_given_passes(engine, sampler, temperature):
    scheduler = scheduler_of(engine, sampler, temperature)
    for version, params in enumerate((SECOND, OTHER, step_from(OTHER, 1e-4)), 1):
        scheduler.load(params, version)
    assert engine.loads == 4
    for request in PLAIN:
        scheduler.submit(request)
    uids = {(r.prompt.counter, s) for r in PLAIN for s in r.samples}
    assert {(r.prompt.counter, r.sample) for r in drive(scheduler)} == uids


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_first_load_that_was_not_made_is_named(engine, sampler, fault):
    engine.fault = fault
    with pytest.raises(WrongWeights, match="the stub did not load version 0 rightly: its log-prob"):
        scheduler_of(engine, sampler)


@pytest.mark.parametrize("size", [0.05, 3e-4, 3e-5])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_later_load_that_was_not_made_is_named_before_a_response_counts(
    engine, sampler, fault, size, caplog
):
    scheduler = scheduler_of(engine, sampler)
    for request in PLAIN:
        scheduler.submit(request)
    scheduler.step()
    engine.fault = fault
    with pytest.raises(WrongWeights, match="the stub did not load version 1 rightly: its log-prob"):
        scheduler.load(step_from(FIRST, size), 1)
    assert engine.loads == 1 + 1 + WRONG_LOADS and "version 1 rightly" in caplog.text


def test_an_engine_that_is_away_keeps_nobody_who_is_told_to_leave(engine, sampler, monkeypatch):
    scheduler, leaving = scheduler_of(engine, sampler), threading.Event()
    lost = LostEngine(engine, HANG, leaving=leaving)

    def away():
        leaving.set()
        raise EngineError("it does not answer")

    monkeypatch.setattr(engine, "status", away)
    with pytest.raises(EngineError, match="was away when this worker was told to end"):
        lost.bring_back(scheduler.params, 1)


def test_an_older_version_is_named(engine, sampler):
    scheduler = scheduler_of(engine, sampler)
    scheduler.load(SECOND, 1)
    engine.fault = lambda given, held: FIRST
    with pytest.raises(WrongWeights, match="the stub did not load version 2 rightly: its log-prob"):
        scheduler.load(step_from(SECOND, 3e-4), 2)


def test_a_load_that_is_made_in_the_end_costs_no_response(engine, sampler, caplog):
    """Tokens that were sampled meanwhile do not count."""
    scheduler = scheduler_of(engine, sampler)
    for request in PLAIN:
        scheduler.submit(request)
    faults = iter([FAULTS["half"], FAULTS["none"], None])
    load = engine.load

    def loads(params, version, *, cache="keep"):
        engine.fault = next(faults)
        load(params, version, cache=cache)

    engine.load = loads
    early = scheduler.step()
    scheduler.load(SECOND, 1)
    assert "is back, with version 1" in caplog.text
    found = [*early, *drive(scheduler)]
    uids = {(r.prompt.counter, s) for r in PLAIN for s in r.samples}
    assert {(r.prompt.counter, r.sample) for r in found} == uids and len(found) == len(uids)
    late = [response for response in found if (response.version == 1).all()]
    ours = own_logp(TINY, 1.0)
    for response in late:
        if len(response.prompt.tokens) <= 16 and len(response.tokens) <= 16:
            (wanted,) = ours(SECOND, [response.prompt.tokens], [response.tokens])
            np.testing.assert_allclose(response.logp, wanted, atol=1e-4)


def test_a_probe_of_an_engine_that_fails_is_no_probe(engine, sampler):
    asked = []
    submit = engine.submit
    engine.submit = lambda requests: (asked.extend(requests), submit(requests))
    scheduler_of(engine, sampler)
    assert len(asked) == PROMPTS and {r.id < 0 and r.counter > COUNTER for r in asked} == {True}


def test_a_request_of_a_probe_that_fails_is_made_again(engine, sampler, caplog):
    """A few faults are no wrong weights; an engine that never answers is an error that says why."""
    faults = iter([Failure(0, "HTTP 500"), "an id of 10^9", "no log-probs"])
    results = engine.results

    def broken(seconds):
        return [faulty(answer, next(faults, "")) for answer in results(seconds)]

    engine.results = broken
    scheduler_of(engine, sampler)
    assert all(text in caplog.text for text in ("HTTP 500", "token id 1000000000,", "no log-probs"))
    assert caplog.text.count("(a probe of its weights)") == 3
    faults = itertools.repeat(Failure(0, "HTTP 503"))
    with pytest.raises(EngineError, match="try 5 of 5: HTTP 503 .a probe of its weights"):
        scheduler_of(engine, sampler)


def faulty(answer, fault):
    """An answer with a fault."""
    if isinstance(fault, Failure):
        return Failure(answer.id, fault.reason)
    if fault == "an id of 10^9":
        return dataclasses.replace(answer, tokens=[10**9, *answer.tokens[1:]])
    return dataclasses.replace(answer, logp=None) if fault else answer


def test_noise_of_an_engine_explains_a_small_share_and_no_large_one():
    draw = np.random.default_rng(0)
    now = -draw.exponential(2.0, 100).astype(np.float32)
    for step in (1e-4, 1e-3, 1e-2, 1e-1):
        before = now + step * draw.standard_normal(100)
        for noise in (1e-6, 1e-3, 1e-2):
            rounding = noise * draw.standard_normal(100)
            assert not Reading.of(now + rounding, now, before).fault([noise], 0.1)
            old = Reading.of(before + rounding, now, before).fault([noise], 0.1)
            half = Reading.of((now + before) / 2 + rounding, now, before).fault([noise], 0.1)
            if step >= 2 * noise:  # a step below the rounding of an engine cannot be seen
                assert "of the way back" in old and "of the way back" in half


def test_a_gap_is_held_against_the_usual_one():
    now = -np.ones(64, np.float32)
    assert not Reading.of(now + 0.05, now).fault([], 0.1)
    assert not Reading.of(now + 0.05, now).fault([0.02, 0.02, 0.02], 0.1)
    assert "above 0.002: it has others" in Reading.of(now + 0.05, now).fault([1e-5] * 3, 0.1)
    assert "above 0.1: it has others" in Reading.of(now + 0.195, now).fault([], 0.1)
    assert Reading.of(now + np.nan, now).fault([], 0.1)
