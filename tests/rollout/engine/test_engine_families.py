"""The sampler with the networks of the families: prefill and decode are the forward pass.

Nightly: for every model family, sampled log-probs and greedy tokens are those of one forward pass.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import TINY, WINDOWED, forward_logp, mesh_of, prompt_of, random_params

from distflow_jax.models.attention import causal_attention
from distflow_jax.models.transformer import head_logits, hidden_states
from distflow_jax.rollout.engine.engine import EngineConfig, RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests

QWEN2 = replace(TINY, family="qwen2", attention_bias=True, tie_embeddings=False)
QWEN3 = replace(TINY, family="qwen3", qk_norm=True, head_dim=24)
QWEN3_MOE = replace(QWEN3, family="qwen3_moe", mlp_size=32, num_experts=8, experts_per_token=3)
# a window in every layer, shorter than the prompts
MISTRAL = replace(TINY, family="mistral", tie_embeddings=False, head_dim=24, sliding_window=9)
NAMES = ["qwen2", "qwen3", "gemma3", "mistral", "qwen3_moe"]
MODELS = [QWEN2, QWEN3, WINDOWED, MISTRAL, QWEN3_MOE]


def families(*often):
    """All of them; those that are not named are left to the nightly tests."""
    marks = [[pytest.mark.slow] * (name not in often) for name in NAMES]
    cases = [pytest.param(m, marks=own) for m, own in zip(MODELS, marks, strict=True)]
    return pytest.mark.parametrize("model", cases, ids=NAMES)


CONFIG = EngineConfig(
    slots=8, max_prompt=32, max_response=20, tokens_per_call=4, page_size=16, group_size=4
)
LENGTHS = (3, 16, 17, 32)
TAKES_PART = (
    *("query_bias", "value_bias", "query_norm", "key_norm"),
    *("attention_post_norm", "mlp_post_norm"),
)


def responses_of(model, params, axes=(1, 1), temperature=0.0, **changes):
    """Two to each of four prompts, none of which ends early."""
    mesh = mesh_of(*axes, names=("data", "tensor"))
    engine = RolloutEngine(model, replace(CONFIG, **changes), mesh, stop_ids=(), seed=3)
    rng = np.random.default_rng(1)
    requests = [
        GroupRequest(
            prompt_of(i, rng.integers(0, model.vocab_size, length)),
            SamplingParams(2, 20, temperature),
        )
        for i, length in enumerate(LENGTHS)
    ]
    state = engine.init_decode_state()
    return run_requests(engine, engine.load_params(params), state, requests)[1]


def best_tokens(model, params, tokens_BT):
    """(argmax [B, T], lead over the second best [B, T]) of one forward pass, without a cache."""
    batch, length = tokens_BT.shape
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))

    @jax.jit
    def run(params):
        hidden, _ = hidden_states(
            model,
            params,
            tokens_BT,
            position,
            lambda q, k, v, _, *window: (causal_attention(q, k, v, *window), None),
        )
        logits = head_logits(model, params, hidden.reshape(batch * length, -1))
        return jax.lax.top_k(logits, 2)

    best, index = (np.asarray(x).reshape(batch, length, 2) for x in run(params))
    return index[..., 0], best[..., 0] - best[..., 1]


@families("qwen3")
def test_greedy_tokens_are_the_forward_passes_best(model):
    params = random_params(model, 2)
    responses = responses_of(model, params)
    tokens = np.zeros((len(responses), max(LENGTHS) + 20), np.int32)
    for row, response in zip(tokens, responses, strict=True):
        assert len(response.tokens) == 20
        whole = np.concatenate([response.prompt.tokens, response.tokens])
        row[: len(whole)] = whole
    best, lead = best_tokens(model, params, jnp.asarray(tokens))
    compared = 0
    for row, response in enumerate(responses):
        first = len(response.prompt.tokens) - 1  # predicts the first token of the response
        clear = lead[row, first : first + 20] > 1e-4
        np.testing.assert_array_equal(
            response.tokens[clear], best[row, first : first + 20][clear], err_msg=str(row)
        )
        compared += clear.sum()
    assert compared > 0.95 * 20 * len(responses)


@families("qwen2", "qwen3_moe")
def test_log_probs_are_those_of_the_trainer(model):
    """Sampled at temperature 1 over 2 x 2 devices, with prompts in pieces."""
    params = random_params(model, 2)
    responses = responses_of(model, params, (2, 2), temperature=1.0, prefill_tokens=16)
    for response, wanted in zip(responses, forward_logp(model, params, responses), strict=True):
        np.testing.assert_allclose(response.logp, wanted, atol=1e-4)
    # and each of them takes part in it
    for name, value in params["layers"].items():
        if name in TAKES_PART:
            one = "norm" in name and not model.norm_offset
            neutral = params["layers"] | {name: np.full_like(value, one)}
            others = forward_logp(model, params | {"layers": neutral}, responses)
            off = [np.abs(r.logp - o).max() for r, o in zip(responses, others, strict=True)]
            assert max(off) > 0.01, name


@families("qwen3")
def test_int8_weights_sample(model):
    params = random_params(model, 2)
    responses = responses_of(model, params, weights_dtype="int8")
    sampled = np.concatenate([response.logp for response in responses])
    off = np.abs(sampled - np.concatenate(forward_logp(model, params, responses)))
    assert 1e-5 < off.mean() < 0.1
