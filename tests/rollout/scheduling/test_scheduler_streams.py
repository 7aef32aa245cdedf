"""Scheduler calls of a server: tokens of unfinished responses, and ends of single responses."""

import numpy as np
import pytest
from support.serving import engine, weights_of
from support.tiny_model import TINY, prompt_of

from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler, run_requests


def group(uid, samples, limit=200):
    tokens = np.random.default_rng(uid).integers(0, TINY.vocab_size, 20 + uid)
    return GroupRequest(prompt_of(uid, tokens), SamplingParams(samples, limit))


@pytest.fixture(scope="module")
def wanted():
    state = engine().init_decode_state()
    requests = [group(0, 6), group(1, 6)]
    responses = run_requests(engine(), weights_of(2), state, requests)[1]
    return {(r.prompt.counter, r.sample): r for r in responses}


def assert_begins(tokens, response):
    ties = np.flatnonzero(response.margin < 1e-4)  # may fall otherwise in another batch
    end = min(len(tokens), ties[0] if len(ties) else len(tokens))
    np.testing.assert_array_equal(tokens[:end], response.tokens[:end])


def drain(scheduler):
    responses = []
    while scheduler.busy:
        responses += scheduler.step()
    assert scheduler.free_slots == 8
    return {(r.prompt.counter, r.sample): r for r in responses}


def test_tokens_under_way_are_the_start_of_the_response(wanted):
    scheduler = Scheduler(engine(), weights_of(2))
    first = scheduler.submit(group(0, 4))
    scheduler.step()
    scheduler.step()
    under_way = list(scheduler.under_way())
    assert under_way and all(id == first for id, _ in under_way)
    assert scheduler.free_slots == 8 - len(under_way)
    for _, partial in under_way:
        assert len(partial.tokens) == 8
        assert_begins(partial.tokens, wanted[0, partial.sample])
    drain(scheduler)
    assert not list(scheduler.under_way())


@pytest.mark.parametrize("put_back", [False, True])
def test_one_response_ends_and_the_others_go_on(wanted, put_back):
    scheduler = Scheduler(engine(), weights_of(2))
    ids = [scheduler.submit(group(uid, 6)) for uid in range(2)]
    scheduler.step()
    gone = [(p.request.prompt.counter, p.sample) for _, p in scheduler.under_way()][::3]
    if put_back:  # they wait to be read again
        scheduler.load(weights_of(2), 1, cache="recompute")
    for uid, sample in gone:
        scheduler.abort_sample(ids[uid], sample)
        with pytest.raises(ValueError, match=f"response {sample} of request {ids[uid]} is not"):
            scheduler.abort_sample(ids[uid], sample)
    responses = drain(scheduler)
    assert responses.keys() == wanted.keys() - set(gone)
    for uid, response in responses.items():
        assert_begins(response.tokens, wanted[uid])


def test_a_group_whose_last_response_is_given_up_is_over():
    scheduler = Scheduler(engine(), weights_of(2))
    id = scheduler.submit(group(0, 1))
    scheduler.step()
    scheduler.abort_sample(id, 0)
    assert not scheduler.busy and scheduler.free_slots == 8 and scheduler.abort(id) == []
    scheduler.submit(group(1, 6))
    assert len(drain(scheduler)) == 6
