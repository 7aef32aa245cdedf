"""A tiny model's sampler, what is asked of it in most tests, and how its answers are compared."""

import dataclasses

import numpy as np

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rollout.engine.engine import EngineConfig
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from support.compiled_sampler import CompiledSampler, changed
from support.tiny_model import TINY, prompt_of, random_params

PARAMS = random_params(TINY, 2)
TOKENIZER = Tokenizer.byte_level(TINY.vocab_size)
STOP_IDS = (258, *range(16))  # a response ends after some ten tokens
CONFIG = EngineConfig(
    slots=8, max_prompt=32, max_response=20, tokens_per_call=4, page_size=16, group_size=4
)
NEAR_TIE = 1e-4  # lead of the best over the second-best perturbed logit


class Sampler(CompiledSampler):
    def __init__(self, axes=(1, 1), **changes):
        config = dataclasses.replace(CONFIG, **changes)
        super().__init__(TINY, PARAMS, config, axes=axes, stop_ids=STOP_IDS, tokenizer=TOKENIZER)


def make_requests(seed=0, lengths=(3, 16, 17, 32, 1, 9), limits=(20, 20, 7, 20, 1, 20)):
    """One request per prompt, with 4 samples each. The fourth is greedy, the last is cut by top-k
    and top-p."""
    rng = np.random.default_rng(seed)
    requests = []
    for i, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
        prompt = prompt_of(10 * seed + i, rng.integers(0, TINY.vocab_size, length))
        temperature = (1.0, 0.7, 1.0, 0.0, 1.0, 1.3)[i]
        requests.append(GroupRequest(prompt, SamplingParams(4, limit, temperature)))
    requests[-1] = changed(requests[-1], top_k=20, top_p=0.9)
    return requests


REQUESTS = make_requests()


def by_uid(responses):
    table = {(r.prompt.counter, r.sample): r for r in responses}
    assert len(table) == len(responses)
    return table


def assert_agree(got, wanted, *, atol=1e-4, near_tie=NEAR_TIE):
    """Same tokens up to each response's first near-tie, and most of them before it."""
    got, wanted = by_uid(got), by_uid(wanted)
    assert got.keys() == wanted.keys()
    compared = 0
    for uid, mine in got.items():
        theirs = wanted[uid]
        ties = np.flatnonzero(theirs.margin < near_tie)
        end = ties[0] if len(ties) else max(len(theirs.tokens), len(mine.tokens))
        np.testing.assert_array_equal(mine.tokens[:end], theirs.tokens[:end], err_msg=str(uid))
        np.testing.assert_allclose(mine.logp[:end], theirs.logp[:end], atol=atol)
        compared += end
    assert compared > 0.8 * sum(len(r.tokens) for r in wanted.values())


def drive(scheduler):
    """Steps until nothing is busy; {uid: response}."""
    found = []
    for _ in range(1000):
        if not scheduler.busy:
            break
        found += scheduler.step()
    assert not scheduler.busy
    assert len({(r.prompt.counter, r.sample) for r in found}) == len(found)
    return by_uid(found)


def assert_same(got, wanted, atol=1e-4):
    """Equal tokens up to a near-tie, and log-probs up to there."""
    assert got.keys() == wanted.keys()
    for uid, response in wanted.items():
        ties = np.flatnonzero(response.margin < NEAR_TIE)
        end = ties[0] if len(ties) else len(response.tokens)
        np.testing.assert_array_equal(got[uid].tokens[:end], response.tokens[:end], str(uid))
        np.testing.assert_allclose(got[uid].logp[:end], response.logp[:end], atol=atol)


def assert_all_free(scheduler):
    """Every slot, prompt and page, as the scheduler and as the devices see it."""
    state, engine = scheduler.close(), scheduler.engine
    loop, slots = scheduler._loop, scheduler._loop.slots
    assert sorted(sum(slots.free, [])) == list(range(engine.max_concurrent_decodes))
    assert slots.free_lanes == [engine.shapes.lanes] * engine.shapes.ranks
    assert not (slots.sequences or slots.held or slots.returning or loop.parked or loop.groups)
    for entries in slots.prompts.entries:
        assert sorted(entries) == list(range(engine.shapes.slots))
    state = engine.change(state)
    assert not np.asarray(engine.shapes.alive(state)).any()
    return state


def submit_all(scheduler, requests=REQUESTS):
    return [scheduler.submit(request) for request in requests]
