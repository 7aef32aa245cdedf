"""Requests that come and go: what is drawn is what run_requests draws; versions, aborts, swaps."""

import numpy as np
import pytest
from serving import engine, weights_of
from tiny_model import TINY, prompt_of

from distflow_jax.rollout.scheduler import GroupRequest, run_requests
from distflow_jax.rollout.serve_scheduler import Scheduler

K = 4  # tokens per call


def requests():
    rng = np.random.default_rng(0)
    lengths, limits = (3, 16, 17, 48, 1, 9), (20, 40, 7, 200, 1, 33)
    return [
        GroupRequest(
            prompt_of(i, rng.integers(0, TINY.vocab_size, length)), 5, limit, (1.0, 0.7, 0.0)[i % 3]
        )
        for i, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


@pytest.fixture(scope="module")
def wanted():
    state = engine().init_decode_state()
    return {
        (r.prompt.counter, r.sample): r
        for r in run_requests(engine(), weights_of(2), state, requests())[1]
    }


def drain(scheduler):
    responses = []
    while scheduler.busy:
        responses += scheduler.step()
    assert scheduler.free_slots == 8
    return {(r.prompt.counter, r.sample): r for r in responses}


def assert_same(got, want):
    # both draw alike up to the first near-tie: another order makes other sums
    ties = np.flatnonzero(want.margin < 1e-4)
    end = ties[0] if len(ties) else len(want.tokens)
    np.testing.assert_array_equal(got.tokens[:end], want.tokens[:end])
    np.testing.assert_allclose(got.logp[:end], want.logp[:end], atol=1e-4)
    if not len(ties):
        assert len(got.tokens) == len(want.tokens) and got.finished == want.finished


def test_draws_what_run_requests_draws_whenever_requests_come(wanted):
    scheduler = Scheduler(engine(), weights_of(2), version=7)
    responses, heard, pieces = {}, [], []
    for request in requests():
        scheduler.submit(request, heard.append, pieces.append)
        for r in scheduler.step():
            responses[r.prompt.counter, r.sample] = r
    responses |= drain(scheduler)
    assert responses.keys() == wanted.keys()
    for uid, response in responses.items():
        assert_same(response, wanted[uid])
        assert (response.version == 7).all() and len(response.version) == len(response.tokens)
    assert len(heard) == len(responses)
    assert sum(len(p.tokens) for p in pieces) == sum(len(r.tokens) for r in responses.values())
    assert sum(p.last for p in pieces) == len(responses)


def test_abort_frees_slots_and_leaves_others_alone(wanted):
    scheduler = Scheduler(engine(), weights_of(2))
    ids = [scheduler.submit(r) for r in requests()[:4]]
    scheduler.step()
    partial = scheduler.abort(ids[0])
    assert [r.sample for r in partial] == list(range(5)) and scheduler.free_slots == 5
    assert not any(r.finished for r in partial)
    for r in partial:
        np.testing.assert_array_equal(r.tokens, wanted[0, r.sample].tokens[: len(r.tokens)])
    assert [r.sample for r in scheduler.abort(ids[1], 2)] == [2]
    assert scheduler.abort(ids[1], 4) == scheduler.abort(ids[2]) == []  # had not begun
    assert scheduler.abort(ids[0]) == []
    responses = drain(scheduler)
    assert responses.keys() == {(1, 0), (1, 1), (1, 3), *((3, s) for s in range(5))}
    for uid, response in responses.items():
        assert_same(response, wanted[uid])


def test_an_aborted_slot_computes_no_more():
    scheduler = Scheduler(engine(), weights_of(2))
    id = scheduler.submit(requests()[3])
    scheduler.step()
    scheduler.abort(id)
    assert not np.asarray(scheduler._state.active).any()


def test_versions_are_those_of_the_weights_that_computed_the_logits(wanted):
    """The first token after a swap comes from logits that the weights before had computed."""
    scheduler = Scheduler(engine(), weights_of(2), version=1)
    scheduler.submit(requests()[1])
    scheduler.step()
    scheduler.step()
    scheduler.load(weights_of(2), 9)  # the same ones: nothing else may change
    responses = drain(scheduler)
    assert max(len(r.tokens) for r in responses.values()) > 3 * K
    for uid, response in responses.items():
        assert_same(response, wanted[uid])
        version = np.where(np.arange(len(response.tokens)) <= 2 * K, 1, 9)
        np.testing.assert_array_equal(response.version, version)


def test_other_weights_take_over_where_the_old_ones_stopped():
    def first_calls(load):
        scheduler = Scheduler(engine(), weights_of(2), version=0)
        scheduler.submit(requests()[3])
        scheduler.step()
        if load:
            scheduler.load(weights_of(5), 1)
        return drain(scheduler)

    old, swapped = first_calls(False), first_calls(True)
    same = K + 1  # and one more: its logits were there
    for uid, response in swapped.items():
        np.testing.assert_array_equal(response.tokens[:same], old[uid].tokens[:same])
    assert any(r.tokens.tolist() != old[uid].tokens.tolist() for uid, r in swapped.items())


def test_a_group_that_has_not_begun_is_the_new_weights_alone():
    scheduler = Scheduler(engine(), weights_of(2), version=0)
    for request in requests()[2:4]:  # ten responses, eight slots
        scheduler.submit(request)
    scheduler.step()
    scheduler.load(weights_of(5), 1)
    responses = drain(scheduler)
    state = engine().init_decode_state()
    new = run_requests(engine(), weights_of(5), state, requests()[3:4])[1]
    for sample in (3, 4):
        assert_same(responses[3, sample], new[sample])
        assert (responses[3, sample].version == 1).all()
