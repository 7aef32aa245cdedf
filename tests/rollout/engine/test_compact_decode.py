"""The few responses that are left: the small program gives what the whole one gives.

Nightly: the program for the last few responses gives the states and tokens of the whole one, on
more meshes.
"""

import dataclasses

import jax
import numpy as np
import pytest
from support.tiny_model import TINY, mesh_of
from support.tiny_sampler import (
    CONFIG,
    PARAMS,
    REQUESTS,
    STOP_IDS,
    assert_agree,
    assert_all_free,
    drive,
)

from distflow_jax.observe.compilations import Compilations
from distflow_jax.rollout.decode_state import DecodeState
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.engine.slot_updates import SlotRequest
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler, run_requests


def make(axes=(1, 1), **changes):
    config = dataclasses.replace(CONFIG, **changes)
    mesh = mesh_of(*axes, names=("data", "tensor"))
    engine = RolloutEngine(TINY, config, mesh, stop_ids=STOP_IDS, seed=3)
    params = engine.load_params(PARAMS)
    engine.compile(params)
    return engine, params


def occupied(engine, params):
    """Responses to some prompts; one that has ended and is kept, others that are gone."""
    state = engine.init_decode_state()
    rng = np.random.default_rng(0)
    size = engine.shapes.slots

    def start(state, length, slots, keep=False):
        (prefix,) = engine.prompts.row(params, [rng.integers(0, TINY.vocab_size, length)])
        requests = [SlotRequest(slot, 0, SamplingParams(1, 20), keep=keep) for slot in slots]
        return engine.start(prefix, state, slots, requests)[0]

    state = start(state, 17, [3, 9, 14], keep=True)
    state = start(state, 5, [7])
    state = start(state, 20, [0, 1])
    if engine.shapes.ranks > 1:
        state = start(state, 9, [size + 2, size + 15])
    state = dataclasses.replace(state, active=state.active.at[9].set(False))  # ended, and kept
    return engine.change(state, drop=[0, 1])


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ((1, 1), {}),
        pytest.param((2, 1), {}, marks=pytest.mark.slow),
        pytest.param((2, 2), {}, marks=pytest.mark.slow),
        pytest.param((1, 1), {"speculative_tokens": 2}, marks=pytest.mark.slow),
    ],
)
def test_states_and_results_are_equal(axes, changes):
    engine, params = make(axes, slots=16 * axes[0], page_size=4, **changes)
    assert engine.few_slots == 4
    whole, few = (occupied(engine, params) for _ in range(2))
    counter = Compilations()
    for _ in range(6):
        whole, wanted = engine.generate(params, whole)
        few, got = engine.generate(params, few, few=True)
        wanted, got = wanted.convert_to_numpy(), got.convert_to_numpy()
        for name in ("tokens", "valid", "length"):
            start, stop = getattr(wanted, f"{name}_idx")
            mask = wanted.data[:, slice(*wanted.valid_idx)] if name == "tokens" else 1
            np.testing.assert_array_equal(
                got.data[:, start:stop] * mask, wanted.data[:, start:stop] * mask
            )
        valid = wanted.data[:, slice(*wanted.valid_idx)] > 0
        np.testing.assert_allclose(got.logp()[valid], wanted.logp()[valid], atol=1e-5)
        np.testing.assert_array_equal(got.active(), wanted.active())
        np.testing.assert_array_equal(got.free_pages(), wanted.free_pages())
    assert counter.take() == 0, counter.names()
    counter.close()
    for field in dataclasses.fields(DecodeState):
        if field.name in ("cache", "seed", "logits", "history", "forced"):
            continue  # of slots that are empty these are anything
        np.testing.assert_array_equal(
            getattr(few, field.name), getattr(whole, field.name), err_msg=field.name
        )
    owners = [np.asarray(jax.device_get(s.cache.owner)) for s in (few, whole)]
    for rank in range(axes[0]):
        assert sorted(owners[0][rank]) == sorted(owners[1][rank])
    assert 3 in owners[0][0]  # kept


@pytest.mark.slow
def test_schedules_go_through_both_programs():
    small, params = make()
    _, responses, _ = run_requests(small, params, small.init_decode_state(), REQUESTS)
    engine, params = make(slots=16)
    scheduler = Scheduler(engine, params)
    calls = []
    generate = engine.generate

    def noted(*args, few):
        calls.append(few)
        return generate(*args, few=few)

    engine.generate = noted
    for request in REQUESTS:
        scheduler.submit(request)
    assert_agree(drive(scheduler).values(), responses)
    scheduler.submit(REQUESTS[1])
    of_one = [r for r in responses if r.prompt.counter == REQUESTS[1].prompt.counter]
    assert_agree(drive(scheduler).values(), of_one)
    assert set(calls) == {False, True}
    assert_all_free(scheduler)


def test_small_engines_have_no_smaller_one():
    engine = RolloutEngine(
        TINY, CONFIG, mesh_of(1, 1, names=("data", "tensor")), stop_ids=STOP_IDS, seed=3
    )
    assert engine.few_slots == 0
