"""Requests at any time on one engine: each answer is that of its uid and its weights."""

import dataclasses

import jax
import numpy as np
import pytest
from support.tiny_model import TINY, random_params
from support.tiny_sampler import PARAMS, REQUESTS, Sampler, assert_same, by_uid, drive, submit_all

from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.rollout.scheduling.scheduler import Scheduler


@pytest.fixture(scope="module")
def compiled():
    return Sampler(max_read=32 + 20)


@pytest.fixture
def engine(compiled):
    return compiled.engine


@pytest.fixture
def params(engine):
    return engine.load_params(PARAMS)


@pytest.fixture
def wanted(engine, params):
    scheduler = Scheduler(engine, params)
    submit_all(scheduler)
    return drive(scheduler)


def sampler_of(engine, params, **how):
    return EpisodeSampler(engine, SamplerState(params, 0, engine.init_decode_state()), **how)


def finish(sampler, found=None):
    """All requests' responses by uid."""
    found = {} if found is None else found
    while sampler.busy:
        for key, episodes in sampler.round():
            assert key not in found
            found[key] = [episode.response for episode in episodes]
    return by_uid([response for responses in found.values() for response in responses])


def test_answers_are_those_of_the_scheduler(engine, params, wanted):
    heard = []
    sampler = sampler_of(engine, params, on_response=heard.append)
    for i, request in enumerate(REQUESTS):
        sampler.submit(i, request)
    got = finish(sampler)
    assert_same(got, wanted)
    assert by_uid(heard).keys() == wanted.keys()
    counts = sampler.counts
    assert counts.tokens == sum(len(r.tokens) for r in got.values())
    assert counts.occupancy.calls > 0 and counts.under_way == 0


def test_it_begins_as_new_when_nothing_is_under_way(engine, params, wanted):
    """To the bit: the second answers do not depend on the first ones."""
    sampler = sampler_of(engine, params)
    runs = []
    for _ in range(2):
        for i, request in enumerate(REQUESTS):
            sampler.submit(i, request)
        runs.append(finish(sampler))
    for uid, response in runs[0].items():
        np.testing.assert_array_equal(runs[1][uid].tokens, response.tokens)
        np.testing.assert_array_equal(runs[1][uid].logp, response.logp)


def test_what_is_put_back_goes_on(engine, params, wanted):
    sampler, found = sampler_of(engine, params), {}
    for i, request in enumerate(REQUESTS):
        sampler.submit(i, request)
    for _ in range(2):
        found |= {key: [e.response for e in episodes] for key, episodes in sampler.round()}
    state, partials = sampler.suspend()
    assert sum(len(p.tokens) for p in partials) > 0
    other = Scheduler(engine, params, state=state.decode)  # something else meanwhile
    other.submit(REQUESTS[0])
    drive(other)
    sampler.resume(dataclasses.replace(state, decode=other.close()), partials)
    assert_same(finish(sampler, found), wanted)


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_another_sampler_goes_on_with_the_progress(engine, params, wanted, rounds):
    """As after a restart: whole responses are kept, others go on, and the answers are the same."""
    sampler, found = sampler_of(engine, params), {}
    for i, request in enumerate(REQUESTS):
        sampler.submit(i, request)
    for _ in range(rounds):
        found |= {key: [e.response for e in episodes] for key, episodes in sampler.round()}
    progress, counts = sampler.progress(), sampler.counts
    assert progress.keys() == set(range(len(REQUESTS))) - found.keys()
    assert counts.under_way == sum(entry.num_sampled for entry in progress.values())
    returned = sum(len(r.tokens) for responses in found.values() for r in responses)
    assert counts.tokens == returned + counts.under_way
    left = sum(len(REQUESTS[k].samples) - len(entry.episodes) for k, entry in progress.items())
    assert sampler.lacks == left
    sampler.close()
    other = sampler_of(engine, params)
    for key in reversed(progress):  # what has begun comes before all others
        other.submit(key, REQUESTS[key], progress[key])
    assert other.lacks == left
    assert_same(finish(other, found), wanted)
    assert other.lacks == 0
    assert other.counts.tokens == sum(len(r.tokens) for r in wanted.values()) - counts.tokens


def test_progress_does_not_grow_with_later_rounds(engine, params):
    """It is what there was at its moment, as a checkpoint that is written beside the rounds needs
    it: a response that ends meanwhile is still under way in it."""
    sampler = sampler_of(engine, params)
    for i, request in enumerate(REQUESTS):
        sampler.submit(i, request)
    sampler.round()
    sampler.round()
    progress, under_way = sampler.progress(), sampler.counts.under_way
    found = [(p, p.tokens) for entry in progress.values() for p in entry.partials]
    assert sum(len(tokens) for _, tokens in found) > 0
    finish(sampler)
    assert under_way == sum(entry.num_sampled for entry in progress.values())
    for partial, tokens in found:
        np.testing.assert_array_equal(partial.tokens, tokens)


def test_a_response_names_the_weights_of_each_token(engine, params):
    """Responses that a swap interrupts have tokens of both, in order; later ones of the new."""
    sampler, found = sampler_of(engine, params), {}
    for i, request in enumerate(REQUESTS[:2]):
        sampler.submit(i, request)
    sampler.round()
    newer = engine.load_params(random_params(TINY, 7))
    sampler.drain()
    sampler.load(newer, 3)
    sampler.submit("later", REQUESTS[3])
    assert sampler.version == 3
    versions = {uid: r.version for uid, r in finish(sampler, found).items()}
    mixed = [v for v in versions.values() if len(set(v.tolist())) > 1]
    assert mixed and all((np.diff(v) >= 0).all() and set(v.tolist()) == {0, 3} for v in mixed)
    later = REQUESTS[3].prompt.counter
    assert all((v == 3).all() for (counter, _), v in versions.items() if counter == later)


def test_a_request_that_ends_in_a_drain_is_not_lost(engine, params):
    """Its last tokens arrive while weights are swapped: the next round returns it."""
    sampler, found = sampler_of(engine, params), {}
    sampler.submit("only", REQUESTS[4])  # of one token each
    for _ in range(20):
        sampler.drain()
        if not sampler.busy:
            break
        found |= dict(sampler.round())
    assert list(found) == ["only"] and len(found["only"]) == 4


def test_a_request_that_is_dropped_is_not_returned_if_its_last_tokens_come_meanwhile(
    engine, params
):
    """Its responses end in the decode call in flight, for which a suspension waits."""
    ended_meanwhile = 0
    for rounds in range(1, 7):
        heard, returned = [], []
        sampler = sampler_of(engine, params, on_response=heard.append)
        for i, request in enumerate(REQUESTS):
            sampler.submit(i, request)
        for _ in range(rounds):
            returned += [key for key, _ in sampler.round()]
        dropped = set(range(len(REQUESTS))) - set(returned)
        sampler.drop(dropped)
        for key in dropped:
            ended = [r for r in heard if r.prompt is REQUESTS[key].prompt]
            ended_meanwhile += len(ended) == len(REQUESTS[key].samples)
        assert not sampler.busy and not sampler.progress() and sampler.round() == []
        sampler.close()
    assert ended_meanwhile > 0


def test_closing_frees_the_slots(engine, params):
    sampler = sampler_of(engine, params)
    sampler.submit(0, REQUESTS[0])
    sampler.round()
    state = sampler.close()
    assert not sampler.busy
    assert not np.asarray(engine.shapes.alive(engine.change(state.decode))).any()
    jax.block_until_ready(state.params)
