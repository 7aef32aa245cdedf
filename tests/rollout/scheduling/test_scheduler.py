"""The scheduler may preempt, resume, export and abort responses; no token changes.

Nightly: a resumed response, in a turn with a tool's answer, equals one prompt of the same tokens.
"""

import numpy as np
import pytest
from support.compiled_sampler import changed
from support.tiny_model import TINY, prompt_of, random_params
from support.tiny_sampler import (
    CONFIG,
    PARAMS,
    REQUESTS,
    STOP_IDS,
    Sampler,
    assert_all_free,
    assert_same,
    by_uid,
    drive,
    make_requests,
    submit_all,
)

from distflow_jax.observe.compilations import Compilations
from distflow_jax.rollout.decode_state import num_pages
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler, run_requests

OTHER = random_params(TINY, 5)


@pytest.fixture(scope="module")
def sampler():
    """One that can read a prompt with all of its response, piece by piece."""
    return Sampler(max_read=52, prefill_tokens=32, max_forced=6)


@pytest.fixture(scope="module")
def reader():
    """One whose prompts may be as long as another's prompt and response together."""
    return Sampler(max_prompt=52)


@pytest.fixture(scope="module")
def responses(sampler):
    return by_uid(sampler.run(REQUESTS))


@pytest.fixture
def scheduler(sampler):
    made = Scheduler(sampler.engine, sampler.params, version=3, state=sampler.state)
    yield made
    sampler.state = assert_all_free(made)


# -- reading prompts -------------------------------------------------------------------------------


def test_pieces_are_as_good_as_a_whole(sampler, responses):
    """Prompts of up to 32 tokens in rows of 16: all but the short ones are read in pieces."""
    pieces = Sampler(prefill_tokens=16)
    assert pieces.engine.buckets == (16,)
    assert_same(by_uid(pieces.run(REQUESTS)), responses)
    assert pieces.stats.prefills >= 6


def test_short_prompts_share_a_row(sampler):
    wide = Sampler(prefill_tokens=128)
    requests = make_requests(7, lengths=(3, 5, 16, 9, 17, 2))
    requests = [changed(r, num_samples=1) for r in requests]
    got = by_uid(wide.run(requests))
    assert (wide.stats.prefills, wide.stats.prompts) == (1, 6)  # seven pages of 16
    assert_same(got, by_uid(sampler.run(requests)))


@pytest.mark.parametrize("split", [1, 5, 16, 20])
def test_a_prefix_that_exists_is_gone_on_with(sampler, responses, split):
    engine, params, prompt = sampler.engine, sampler.params, REQUESTS[3].prompt
    first = engine.prefill(params=params, padded_tokens=prompt.tokens[:split], true_length=split)
    rest = prompt.tokens[split:]
    prefix = engine.prefill(
        params=params, existing_prefix=first, padded_tokens=rest, true_length=len(rest)
    )
    assert int(prefix.length) == len(prompt.tokens) == 32
    whole = engine.prefill(params=params, padded_tokens=prompt.tokens, true_length=32)
    np.testing.assert_allclose(
        prefix.logits[int(prefix.row)], whole.logits[int(whole.row)], atol=1e-4
    )


# -- the cache -------------------------------------------------------------------------------------


def test_a_prompt_lies_in_the_cache_once(sampler):
    """Four responses to a prompt of two pages: two pages, and one or two of each response's own."""
    engine, shapes = sampler.engine, sampler.engine.shapes
    (prefix,) = engine.prompts.row(sampler.params, [REQUESTS[3].prompt.tokens])
    scheduler = Scheduler(engine, sampler.params, state=sampler.state)
    scheduler.submit(changed(REQUESTS[3], limit=4))
    scheduler._loop._fill()
    owner = np.asarray(scheduler._loop.slots.calls.state.cache.owner)[0]
    assert (owner < shapes.slots).sum() == 0
    assert ((owner >= shapes.slots) & (owner < shapes.owners)).sum() == 2
    drive(scheduler)
    sampler.state = assert_all_free(scheduler)


def test_a_cache_that_is_too_small_for_all_slots(responses):
    """A response without a free page waits; if all wait, the last one is preempted."""
    least = Sampler(max_read=52, cache_tokens=96)
    assert least.engine.shapes.pages == 6
    assert num_pages(CONFIG, 1) > 6
    got = least.run(REQUESTS)
    assert least.stats.preempted > 0
    assert_same(by_uid(got), responses)


# -- responses on their way ------------------------------------------------------------------------


def test_requests_that_come_later(scheduler, responses):
    found = []
    for request in REQUESTS:
        scheduler.submit(request)
        found += scheduler.step()
    found = by_uid(found) | drive(scheduler)
    assert_same(found, responses)
    assert all((r.version == 3).all() and len(r.version) == len(r.tokens) for r in found.values())


def test_the_next_call_is_under_way_when_a_response_is_handed_on(sampler, responses):
    """But where nothing is left to decode; and a slot that has ended misses no call."""
    events, engine = [], sampler.engine
    scheduler = Scheduler(engine, sampler.params, state=sampler.state)
    generate = engine.generate

    def noted(*args, few):
        events.append(sum(not held.ended for held in scheduler._loop.slots.sequences.values()))
        return generate(*args, few=few)

    engine.generate = noted
    for request in REQUESTS:
        scheduler.submit(request, on_response=lambda response: events.append("response"))
    assert_same(drive(scheduler), responses)
    del engine.generate
    calls = [n for n in events if n != "response"]
    assert len(calls) == scheduler.stats.generate_calls
    waits = len(responses)
    first = events.index("response")
    assert events[:first] == calls[:2]  # of what ended in the first call, after the second began
    last = len(events) - events[::-1].index(calls[-1]) - 1
    assert "response" in events[last:] and waits == events.count("response")
    assert calls[0] == calls[1] == engine.max_concurrent_decodes  # refilled before it began
    sampler.state = assert_all_free(scheduler)


def test_pause(scheduler, responses):
    submit_all(scheduler)
    found = scheduler.step()
    scheduler.pause()
    calls = scheduler.stats.generate_calls
    assert scheduler.step() == [] and scheduler.busy
    assert scheduler.stats.generate_calls == calls
    scheduler.resume()
    assert_same(by_uid(found) | drive(scheduler), responses)


def test_abort(scheduler, responses):
    ids = submit_all(scheduler)
    found = scheduler.step() + scheduler.step()
    waiting = ids[4]
    running = next(h.group.id for h in scheduler._loop.slots.sequences.values())
    cut = scheduler.abort(running)
    assert cut and all(len(r.tokens) for r in cut)
    for response in cut:
        whole = responses[response.prompt.counter, response.sample]
        np.testing.assert_array_equal(response.tokens, whole.tokens[: len(response.tokens)])
    assert scheduler.abort(running) == []
    scheduler.abort(waiting)
    found = by_uid(found) | drive(scheduler)
    gone = {REQUESTS[ids.index(i)].prompt.counter for i in (running, waiting)}
    wanted = {uid: r for uid, r in responses.items() if uid[0] not in gone or uid in found}
    assert_same(found, wanted)


def test_export_and_restore(sampler, scheduler, responses):
    """Sampled tokens are kept and the next ones are the same, in another engine too."""
    submit_all(scheduler)
    found = by_uid(scheduler.step() + scheduler.step() + scheduler.step())
    partials = scheduler.export()
    found |= drive(scheduler)  # what had ended by then
    assert len(partials) + len(found) == 24
    assert any(len(p.tokens) for p in partials) and not all(len(p.tokens) for p in partials)
    other = Sampler(max_read=52, slots=4, tokens_per_call=3)
    elsewhere = Scheduler(other.engine, other.params, version=4, state=other.state)
    elsewhere.restore(partials)
    rest = drive(elsewhere)
    assert_same(found | rest, responses)
    versions = {v for r in rest.values() for v in r.version.tolist()}
    assert versions == {3, 4}  # each token has that of the weights that sampled it
    assert_all_free(elsewhere)


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_weights_are_swapped_between_two_calls(sampler, scheduler, responses, cache):
    """With equal weights nothing changes; with others, what was sampled before does not."""
    submit_all(scheduler)
    found = scheduler.step() + scheduler.step()
    scheduler.load(sampler.engine.load_params(PARAMS), 4, cache=cache)
    assert_same(by_uid(found) | drive(scheduler), responses)

    submit_all(scheduler)
    early = by_uid(scheduler.step())
    scheduler.load(sampler.engine.load_params(OTHER), 5, cache=cache)
    late = drive(scheduler)
    scheduler.load(sampler.params, 3)
    for uid, response in (early | late).items():
        old = int((response.version == 4).sum())
        assert (np.diff(response.version) >= 0).all()
        np.testing.assert_array_equal(response.tokens[:old], responses[uid].tokens[:old])
    assert any(len(set(r.version)) == 2 for r in late.values())
    fresh = [r for r in late.values() if r.version[0] == 5]
    assert fresh and any(
        r.tokens.tolist() != responses[r.prompt.counter, r.sample].tokens.tolist() for r in fresh
    )


def test_recomputed_caches_are_those_of_the_new_weights(sampler, scheduler, reader):
    """A response gone on with after a swap is what the new weights make of its tokens so far."""
    request = changed(REQUESTS[2], num_samples=1, temperature=0.0, limit=20)
    scheduler.submit(request)
    assert scheduler.step() == []
    params = sampler.engine.load_params(OTHER)
    scheduler.load(params, 1, cache="recompute")
    (response,) = drive(scheduler).values()
    scheduler.load(sampler.params, 3)
    so_far = response.tokens[response.version == 3]
    assert 0 < len(so_far) < 20
    prompt = prompt_of(request.prompt.counter, np.concatenate([request.prompt.tokens, so_far]))
    requests = [GroupRequest(prompt, SamplingParams(1, 20 - len(so_far), temperature=0.0))]
    others = reader.engine.load_params(OTHER)
    reader.state, (wanted,), _ = run_requests(reader.engine, others, reader.state, requests)
    np.testing.assert_array_equal(response.tokens[len(so_far) :], wanted.tokens)
    np.testing.assert_allclose(response.logp[len(so_far) :], wanted.logp, atol=1e-4)


# -- turns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [pytest.param(3, marks=pytest.mark.slow), 5, 9])
def test_a_response_is_gone_on_with(scheduler, reader, answer):
    """A tool's answer of 3 or 5 tokens is fed beside the others' decoding, one of 9 read anew; both
    are what one prompt of all of it gives."""
    request = changed(REQUESTS[1], num_samples=2, limit=6, temperature=0.0, hold=True)
    group = scheduler.submit(request)
    first = drive(scheduler)
    tokens = np.arange(40, 40 + answer)
    turns = {}
    for (_, sample), response in first.items():
        scheduler.held.extend(group, sample, tokens, limit=20)
        turns[sample] = np.concatenate([request.prompt.tokens, response.tokens, tokens])
    second = drive(scheduler)
    for (_, sample), response in second.items():
        spent = len(turns[sample]) - len(request.prompt.tokens)
        prompt = prompt_of(request.prompt.counter, turns[sample])
        (wanted,) = reader.run(
            [GroupRequest(prompt, SamplingParams(1, 20 - spent, temperature=0.0))]
        )
        np.testing.assert_array_equal(response.tokens, wanted.tokens)
        np.testing.assert_allclose(response.logp, wanted.logp, atol=1e-4)
        scheduler.held.release(group, sample)


def test_who_waits_takes_the_slot_that_was_held_for_the_longest_time(scheduler):
    """The held response goes on later: its tokens are read again, and the next are the same."""
    slots, found = scheduler.engine.config.slots, []
    for wait in (False, True):
        full = changed(REQUESTS[0], num_samples=slots, limit=4, hold=True)
        group = scheduler.submit(full)
        assert len(drive(scheduler)) == slots
        if wait:
            scheduler.submit(changed(REQUESTS[1], num_samples=1))
            assert len(drive(scheduler)) == 1
            ((_, sample),) = scheduler._loop.parked
        for sample in range(slots):
            scheduler.held.extend(group, sample, [50, 51, 52], limit=16)
        found.append({s: r.tokens.tolist() for (_, s), r in drive(scheduler).items()})
        for sample in range(slots):
            scheduler.held.release(group, sample)
        assert not scheduler._loop.parked and scheduler.free_slots == slots
    assert found[0] == found[1]


def test_what_cannot_be_gone_on_with_is_refused(scheduler):
    group = scheduler.submit(changed(REQUESTS[1], num_samples=1, limit=3, hold=True))
    with pytest.raises(ValueError, match=f"response 0 of request {group} is not held"):
        scheduler.held.extend(group, 0, [1], 20)
    (response,) = drive(scheduler).values()
    with pytest.raises(ValueError, match="leaves nothing to sample"):
        scheduler.held.extend(group, 0, [1, 2], len(response.tokens) + 2)
    with pytest.raises(ValueError, match="the engine's 20"):
        scheduler.held.extend(group, 0, [1, 2], 21)
    scheduler.held.release(group, 0)
    with pytest.raises(ValueError, match="is not held"):
        scheduler.held.release(group, 0)


# -- as a whole ------------------------------------------------------------------------------------


def test_bad_requests_harm_no_other(scheduler, responses):
    submit_all(scheduler)
    found = scheduler.step()
    good = REQUESTS[0]
    for change, error in [
        ({"prompt": prompt_of(9, np.zeros(0, np.int32))}, "1 to 32 tokens, got 0"),
        ({"prompt": prompt_of(9, np.zeros(33, np.int32))}, "1 to 32 tokens, got 33"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"limit": 21}, "allowed 1 to 20 tokens, got 21"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        (
            {"temperature": -1.0},
            "temperature must be 0, which is greedy, or at least 1e-30, got -1",
        ),
        ({"temperature": float("nan")}, "temperature must be a finite number, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_k": -1}, "top_k must be at least 0"),
    ]:
        with pytest.raises(ValueError, match=error):
            scheduler.submit(changed(good, **change))
    assert_same(by_uid(found) | drive(scheduler), responses)


def test_random_lives_compile_nothing_and_lose_nothing(sampler, scheduler):
    rng = np.random.default_rng(0)
    counter, wanted, got, ids = Compilations(), 0, 0, []
    for round in range(30):
        for request in make_requests(
            100 + round, rng.integers(1, 33, 2).tolist(), rng.integers(1, 21, 2).tolist()
        ):
            ids.append(scheduler.submit(request))
            wanted += request.sampling.num_samples
        got += len(scheduler.step())
        if round % 7 == 3:
            partials = scheduler.export()
            scheduler.restore(partials)
        if round % 7 == 5:
            scheduler.load(sampler.params, round, cache=("keep", "recompute")[round % 2])
        if round % 9 == 4:
            group = scheduler._loop.groups.get(ids[rng.integers(len(ids))])
            if group is not None:
                got += group.left
                scheduler.abort(group.id)
    got += len(drive(scheduler))
    assert got == wanted
    assert counter.take() == 0, counter.names()
    counter.close()
    assert set(STOP_IDS)  # some ended by themselves
