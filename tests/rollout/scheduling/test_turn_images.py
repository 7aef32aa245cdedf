"""Images in later turns of a response: the sampler gives the trainer's log-probs behind them."""

import dataclasses

import numpy as np
import pytest
from support.compiled_sampler import CompiledSampler
from support.seeing import MODELS, seeing_prompt, seeing_rows, sizes_of
from support.tiny_model import mini_batch, random_params, values_of
from support.tiny_sampler import STOP_IDS, assert_same, drive

from distflow_jax.batch import Prompt, RowShape, Samples
from distflow_jax.images.turn_images import TurnImages, joined, of_prompt
from distflow_jax.observe.compilations import Compilations
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler
from distflow_jax.training.forward import ForwardConfig, response_logp

TURN, TURNS = 5, 4  # tokens of a turn at most
CONFIG = EngineConfig(
    slots=8,
    max_prompt=64,
    max_response=112,
    max_read=64 + 112,
    tokens_per_call=4,
    page_size=16,
    group_size=2,
    prefill_tokens=64,
)
PARAMS = {name: random_params(model) for name, model in MODELS.items()}
ALL = [
    "smolvlm",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "qwen3_vl", "gemma3")),
]


def sampler_of(name, **changes):
    model = MODELS[name]
    config = dataclasses.replace(CONFIG, images=sizes_of(model, 64), **changes)
    return CompiledSampler(model, PARAMS[name], config, stop_ids=STOP_IDS)


@dataclasses.dataclass
class Told:
    """A response so far: (tokens, log-probs, margins, whether they were sampled, images)."""

    prompt: Prompt
    sample: int
    parts: list = dataclasses.field(default_factory=list)

    def add(self, tokens, logp=None, margin=None, shown=None):
        count, sampled = len(tokens), logp is not None
        logp = np.zeros(count, np.float32) if logp is None else logp
        margin = np.full(count, np.inf) if margin is None else margin
        self.parts.append((tokens, logp, margin, np.full(count, sampled), shown))

    def column(self, number):
        return np.concatenate([part[number] for part in self.parts])

    @property
    def tokens(self):
        return self.column(0).astype(np.int32)

    @property
    def logp(self):
        return self.column(1)

    @property
    def margin(self):
        return self.column(2)

    @property
    def mask(self):
        return self.column(3).astype(bool)

    @property
    def shown(self):
        return joined((len(part[0]), part[4]) for part in self.parts)


def observation(model, counter, turn):
    """What is shown to all responses to a prompt: in turn 2 nothing, in turn 3 what turn 1 had."""
    prompt = seeing_prompt(model, counter, (0, 1, 0, 2)[turn], seed=7)
    shown = TurnImages(prompt.images, prompt.patch) if prompt.images else None
    return prompt.tokens, shown


def play(sampler, name, between=None, groups=3):
    """Responses of several turns, {uid: Told}; `between(scheduler)` is called in the last turn."""
    model, scheduler = MODELS[name], Scheduler(sampler.engine, sampler.params, state=sampler.state)
    told, group_of = {}, {}
    for counter in range(groups):
        prompt = seeing_prompt(model, counter, counter % 3)
        request = GroupRequest(prompt, SamplingParams(2, TURN, 1.0), hold=True)
        group_of[counter] = scheduler.submit(request)
        told |= {(counter, sample): Told(prompt, sample) for sample in range(2)}
    turns = drive(scheduler)
    for turn in range(1, TURNS + 1):
        for uid, response in turns.items():
            told[uid].add(response.tokens, response.logp, response.margin)
        if turn == TURNS:
            break
        for (counter, sample), response in sorted(turns.items()):
            one = told[counter, sample]
            tokens, shown = observation(model, counter, turn)
            one.add(tokens, shown=shown)
            limit = len(one.tokens) + TURN
            scheduler.held.extend(group_of[counter], sample, tokens, limit, shown)
            assert response.tokens[-1] in STOP_IDS or len(response.tokens) == TURN
        if between is not None and turn == TURNS - 1:
            found = between(scheduler)
            turns = found | drive(scheduler)
        else:
            turns = drive(scheduler)
    sampler.stats, sampler.state = scheduler.stats, scheduler.close()
    return told


def samples_of(told):
    return Samples(
        [one.prompt for one in told],
        np.array([(one.prompt.counter, one.sample) for one in told], np.int64),
        [one.tokens for one in told],
        [one.mask for one in told],
    )


def trained_logp(name, told, shared):
    """Log-probs of responses in one pass of the trainer over packed rows."""
    model, samples = MODELS[name], samples_of(told)
    shape, shown = RowShape(1, 8, 192, 8), [one.shown for one in told]
    rows, placement = seeing_rows(model, samples, shape, shared=shared, shown=shown)
    config, batch = ForwardConfig(logp_chunk=32), mini_batch(rows)
    logp = response_logp(PARAMS[name], model, batch, np.float32(1.0), config)[0]
    return values_of(samples, placement, np.asarray(logp)[None])


def as_prompt(one, last):
    """The response with all but its `last` tokens in the prompt."""
    prompt, first = one.prompt, len(one.tokens) - last
    before = of_prompt(prompt.images, prompt.patch)
    seen = joined([(len(prompt.tokens), before), (len(one.tokens), one.shown)])
    tokens = np.concatenate([prompt.tokens, one.tokens[:first]])
    whole = dataclasses.replace(prompt, tokens=tokens)
    if seen is not None:
        whole = dataclasses.replace(whole, images=seen.images, patch=seen.patch[: len(tokens)])
    found = Told(whole, 0)
    found.add(one.tokens[first:], one.logp[first:])
    return found


def check(name, told):
    """The sampler's log-probs are the trainer's, and those of the last turn after one prompt."""
    told = [told[uid] for uid in sorted(told)]
    for one, mine in zip(told, trained_logp(name, told, shared=True), strict=True):
        np.testing.assert_allclose(one.logp[one.mask], mine[one.mask], atol=1e-4)
        assert one.mask.sum() > TURNS
    last = [len(one.parts[-1][0]) for one in told]
    alone = [as_prompt(one, count) for one, count in zip(told, last, strict=True)]
    for n, one in enumerate(alone):
        one.prompt = dataclasses.replace(one.prompt, counter=n)
    for one, mine in zip(alone, trained_logp(name, alone, shared=False), strict=True):
        np.testing.assert_allclose(one.logp, mine, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_log_probs_behind_an_image_of_a_later_turn(name):
    sampler = sampler_of(name)
    compilations = Compilations()
    told = play(sampler, name)
    names = compilations.names()
    assert compilations.take() == 0, names
    compilations.close()
    check(name, told)
    assert {len(one.shown.images) for one in told.values()} == {3}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "changes",
    [
        dict(prefill_tokens=16),  # pieces that cut images
        dict(prefix_tokens=48),
        dict(slots=4, cache_tokens=448),  # sequences are preempted
        dict(speculative_tokens=2),
    ],
)
def test_no_way_of_reading_changes_a_log_prob(name, changes):
    if name == "gemma3" and "prefill_tokens" in changes:
        changes = changes | dict(prefill_tokens=32)
    check(name, play(sampler_of(name, **changes), name, groups=2 if "slots" in changes else 3))


def test_a_response_with_images_is_exported_and_restored():
    """Preempted by other weights, exported and restored, a response goes on with its images."""
    sampler = sampler_of("smolvlm")
    wanted = play(sampler, "smolvlm", groups=2)

    def between(scheduler):
        found = scheduler.step()
        scheduler.load(sampler.params, 1, cache="recompute")
        found += scheduler.step()
        partials = scheduler.export()
        assert any(p.shown is not None and p.chunks for p in partials)
        scheduler.restore(partials)
        return {(r.prompt.counter, r.sample): r for r in found}

    assert_same(play(sampler, "smolvlm", between, groups=2), wanted)
