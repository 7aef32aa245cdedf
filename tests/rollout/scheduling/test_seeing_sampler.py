"""Samplers with images give the trainer's log-probs, however their prompts are read."""

import dataclasses

import numpy as np
import pytest
from support.compiled_sampler import CompiledSampler
from support.seeing import MODELS, seeing_prompt, seeing_rows, sizes_of
from support.tiny_model import mini_batch, random_params, values_of
from support.tiny_sampler import STOP_IDS, assert_same, by_uid, drive

from distflow_jax.batch import RowShape, Samples
from distflow_jax.observe.compilations import Compilations
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler
from distflow_jax.training.forward import ForwardConfig, response_logp

CONFIG = EngineConfig(
    slots=8, max_prompt=64, max_response=16, tokens_per_call=4, page_size=16, group_size=4
)
PARAMS = {name: random_params(model) for name, model in MODELS.items()}


def sampler_of(name, **changes):
    model = MODELS[name]
    config = dataclasses.replace(CONFIG, images=sizes_of(model, 64), **changes)
    return CompiledSampler(model, PARAMS[name], config, stop_ids=STOP_IDS)


def requests_of(name, groups=5):
    model = MODELS[name]
    prompts = [seeing_prompt(model, counter, counter % 3) for counter in range(groups)]
    return [GroupRequest(prompt, SamplingParams(3, 16, 1.0)) for prompt in prompts]


def trained_logp(name, responses):
    """Log-probs of responses in one pass of the trainer over packed rows."""
    model = MODELS[name]
    samples = Samples(
        [r.prompt for r in responses],
        np.array([(r.prompt.counter, r.sample) for r in responses], np.int64),
        [r.tokens for r in responses],
        [np.ones(len(r.tokens), bool) for r in responses],
    )
    rows, placement = seeing_rows(model, samples, RowShape(1, 8, 128, 8), shared=True)
    config, batch = ForwardConfig(logp_chunk=32), mini_batch(rows)
    logp = response_logp(PARAMS[name], model, batch, np.float32(1.0), config)[0]
    return values_of(samples, placement, np.asarray(logp)[None])


def check(name, responses):
    responses = sorted(responses, key=lambda r: (r.prompt.counter, r.sample))
    for mine, response in zip(trained_logp(name, responses), responses, strict=True):
        np.testing.assert_allclose(response.logp, mine, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "smolvlm",
        "qwen3_vl",
        pytest.param("qwen2_5_vl", marks=pytest.mark.slow),
        pytest.param("gemma3", marks=pytest.mark.slow),
    ],
)
def test_a_sampler_gives_the_trainers_log_probs(name):
    sampler, requests = sampler_of(name), requests_of(name)
    compilations = Compilations()
    responses = sampler.run(requests)
    assert compilations.take() == 0
    compilations.close()
    check(name, responses)
    assert sampler.stats.images == sum(len(r.prompt.images) for r in requests)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "changes",
    [
        dict(prefill_tokens=16),  # pieces that cut images
        dict(prefix_tokens=48, prefill_tokens=64),
        dict(max_read=80, cache_tokens=192),  # sequences are preempted
        dict(speculative_tokens=2),
    ],
)
def test_no_way_of_reading_changes_a_log_prob(name, changes):
    if name == "gemma3" and "prefill_tokens" in changes:
        changes = changes | dict(prefill_tokens=32)
    sampler, requests = sampler_of(name, **changes), requests_of(name)
    check(name, sampler.run(requests + requests_of(name, 3)[1:2]))


def test_images_decide_which_prefix_is_shared():
    """The same ids with other pictures share nothing; a swap of weights encodes again."""
    model = MODELS["smolvlm"]
    sampler = sampler_of("smolvlm", prefix_tokens=48, max_read=80, tokens_per_call=2)
    prompt = seeing_prompt(model, 1, 3)
    others = seeing_prompt(model, 1, 3, seed=4).images
    same = dataclasses.replace(prompt, counter=2)
    another = dataclasses.replace(prompt, counter=3, images=others)
    requests = [GroupRequest(p, SamplingParams(2, 16, 1.0)) for p in (prompt, same, another)]
    wanted = {}
    for request in requests:
        wanted |= by_uid(sampler.run([request]))
    check("smolvlm", wanted.values())
    scheduler = Scheduler(sampler.engine, sampler.params, state=sampler.state)
    for request in requests:
        scheduler.submit(request)
    ended = scheduler.step()
    assert scheduler.stats.images == 6
    assert scheduler.stats.prefix_hits == 2
    partials = scheduler.export()
    # one of each, so that both prompts' images are wanted again
    assert {p.request.prompt.counter for p in partials if len(p.tokens)} >= {1, 3}
    scheduler.load(sampler.params, 1)
    scheduler.restore(partials)
    found = by_uid(ended) | drive(scheduler)
    assert_same(found, wanted)
    assert scheduler.stats.images == 12
    sampler.state = scheduler.close()
