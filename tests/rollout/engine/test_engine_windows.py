"""Layers that see a window only, in the sampler: log-probs are those of the trainer's one pass over
prompt and response, however prompts are read and responses decoded.

Nightly: layers with windows: sampled log-probs are the trainer's, however prompts are prefilled and
responses decoded.
"""

import dataclasses

import numpy as np
import pytest
from support.tiny_model import WINDOWED, forward_logp, mesh_of, prompt_of, random_params

from distflow_jax.rollout.engine.engine import EngineConfig, RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests

CONFIG = EngineConfig(
    slots=8, max_prompt=48, max_response=24, tokens_per_call=4, page_size=8, group_size=4
)
MODEL = dataclasses.replace(WINDOWED, vocab_size=24)  # so few tokens that guesses hold
PARAMS = random_params(MODEL, 2)
LENGTHS = (19, 48, 2, 7)  # below the window of 6, and above a page of 8


def prompts():
    """Text that repeats; the first two begin alike."""
    rng = np.random.default_rng(1)
    tokens = [np.resize(rng.integers(0, 24, 9), n) for n in LENGTHS]
    tokens[1][:16] = tokens[0][:16]
    return [prompt_of(i, x) for i, x in enumerate(tokens)]


def sampled(axes=(1, 1), samples=2, model=MODEL, **changes):
    mesh = mesh_of(*axes, names=("data", "tensor"))
    config = dataclasses.replace(CONFIG, **changes)
    engine = RolloutEngine(model, config, mesh, stop_ids=(), seed=3)
    requests = [GroupRequest(p, SamplingParams(samples, 24, 1.0)) for p in prompts()]
    state, params = engine.init_decode_state(), engine.load_params(PARAMS)
    _, responses, stats = run_requests(engine, params, state, requests)
    return responses, stats


def assert_trainers(responses, model=MODEL, atol=1e-4):
    assert all(len(r.tokens) == 24 for r in responses)
    for response, wanted in zip(responses, forward_logp(model, PARAMS, responses), strict=True):
        np.testing.assert_allclose(response.logp, wanted, atol=atol)


SLOW = {
    "one response per prompt": dict(samples=1, group_size=1),
    "pieces after a shared prefix": dict(prefill_tokens=16, prefix_tokens=16),
    "the kernels, after a shared prefix": dict(attention="reference", prefix_tokens=16),
    "int8 cache": dict(cache_dtype="int8"),
    "data and tensor ranks": dict(axes=(2, 2), prefill_tokens=16),
    "few responses left": dict(slots=16, samples=1),
    "guesses, with layers apart": dict(speculative_tokens=3, prefill_tokens=16),
    "guesses, by the kernels": dict(speculative_tokens=3, attention="reference"),
    "the kernels' int8 cache": dict(cache_dtype="int8", attention="reference", group_size=1),
}


@pytest.mark.parametrize(
    "changes",
    [
        dict(speculative_tokens=3, prefill_tokens=16, weights="stacked"),
        *(pytest.param(changes, marks=pytest.mark.slow, id=name) for name, changes in SLOW.items()),
    ],
)
def test_log_probs_are_those_of_the_trainer(changes):
    responses, stats = sampled(**changes)
    assert_trainers(responses, atol=0.05 if changes.get("cache_dtype") else 1e-4)
    if changes.get("speculative_tokens"):
        assert stats.accepted > 0  # guesses that held
    if changes.get("prefix_tokens"):
        assert stats.prefix_hits > 0


@pytest.mark.slow
def test_the_window_takes_part():
    """With every layer seeing all, or a window of one token more, log-probs are others."""
    responses, _ = sampled()
    assert_trainers(responses)
    for changes in ({"sliding_window": 7}, {"sliding_window": 64}, {"rope_local_theta": 60.0}):
        others = forward_logp(dataclasses.replace(MODEL, **changes), PARAMS, responses)
        off = [np.abs(r.logp - o).max() for r, o in zip(responses, others, strict=True)]
        assert max(off) > 0.01, changes
