"""Images in later turns of a response: the sampler gives the trainer's log-probs behind them.

Nightly: behind an image of a later turn log-probs are the trainer's, in every family and however a
response is read again.
"""

import dataclasses
import functools

import numpy as np
import pytest
from support.compiled_sampler import CompiledSampler
from support.parking import park_at_random
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
    """Images shown to all responses to a prompt: in turn 2 none, in turn 3 those of turn 1."""
    prompt = seeing_prompt(model, counter, (0, 1, 0, 2)[turn], seed=7)
    shown = TurnImages(prompt.images, prompt.patch) if prompt.images else None
    return prompt.tokens, shown


class Play:
    """Responses of several turns to some prompts; `alike`: to one, under several counters."""

    def __init__(self, sampler, name, groups=3, alike=False):
        self.model, self.told, self._turn, self._group = MODELS[name], {}, {}, {}
        self.scheduler = Scheduler(sampler.engine, sampler.params, state=sampler.state)
        for counter in range(groups):
            prompt = seeing_prompt(self.model, counter, counter % 3)
            if alike:
                prompt = seeing_prompt(self.model, 1, 3)
                prompt = dataclasses.replace(prompt, counter=counter)
            request = GroupRequest(prompt, SamplingParams(2, TURN, 1.0), hold=True)
            self._group[counter] = self.scheduler.submit(request)
            for sample in range(2):
                self.told[counter, sample] = Told(prompt, sample)
                self._turn[counter, sample] = 0

    def ended(self, response):
        """Answers a turn at once, or releases the response after the last one."""
        uid = counter, sample = response.prompt.counter, response.sample
        one, held = self.told[uid], self.scheduler.held
        one.add(response.tokens, response.logp, response.margin)
        self._turn[uid] += 1
        if self._turn[uid] == TURNS:
            held.release(self._group[counter], sample)
            return
        tokens, shown = observation(self.model, counter, self._turn[uid])
        one.add(tokens, shown=shown)
        held.extend(self._group[counter], sample, tokens, len(one.tokens) + TURN, shown)


def play(sampler, name, again=0, late=1, **settings):
    """{uid: Told} of responses that are answered up to `late` rounds after they have ended, if not
    at once; `again`: rounds after which those under way are preempted, each time."""
    found, rounds, rng = Play(sampler, name, **settings), 0, np.random.default_rng(4)
    due = []  # (round, response)
    while found.scheduler.busy or due:
        due += [(rounds + rng.integers(late), r) for r in found.scheduler.step()]
        for response in [response for when, response in due if when <= rounds]:
            found.ended(response)
        due = [entry for entry in due if entry[0] > rounds]
        rounds += 1
        if again and rounds % again == 0:
            found.scheduler.load(sampler.params, rounds, cache="recompute")
    sampler.stats, sampler.state = found.scheduler.stats, found.scheduler.close()
    return found.told


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


@pytest.fixture(scope="module")
def samplers():
    """Makes the sampler of a family, once."""
    return functools.cache(functools.partial(sampler_of, tokens_per_call=2))


@pytest.mark.parametrize("name", ALL)
def test_log_probs_behind_an_image_of_a_later_turn(samplers, name):
    sampler = samplers(name)
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
    ("changes", "counted"),
    [
        (dict(prefill_tokens=16), "prefills"),  # pieces that cut images
        (dict(prefix_tokens=48), "prefix_hits"),
        (dict(speculative_tokens=2, speculative_ngram=1), "proposed"),
    ],
)
def test_no_way_of_reading_changes_a_log_prob(name, changes, counted):
    if name == "gemma3" and "prefill_tokens" in changes:
        changes = changes | dict(prefill_tokens=32)
    sampler = sampler_of(name, **changes)
    check(name, play(sampler, name, alike=counted == "prefix_hits"))
    # no prefix of Gemma's ends behind the beginning of an image, and there are few tokens before
    assert getattr(sampler.stats, counted) > 0 or (name, counted) == ("gemma3", "prefix_hits")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_responses_are_read_again_and_again(name):
    """Preempted after every second round, responses come back with the images of all turns."""
    sampler = sampler_of(name, tokens_per_call=1)
    wanted = play(sampler, name)
    prefills = sampler.stats.prefills
    found = play(sampler, name, again=2)
    assert sampler.stats.prefills > prefills + 10
    assert_same(found, wanted)
    check(name, found)


@pytest.mark.parametrize("name", ALL)
def test_images_of_parked_responses_are_read_again(samplers, name, monkeypatch):
    """A response that waits for its environment loses its pages, including those of images."""
    sampler = samplers(name)
    wanted = play(sampler, name)
    park_at_random(monkeypatch, 0.5)
    found = play(sampler, name, late=5)
    assert sampler.stats.parked > 3
    assert_same(found, wanted)
    check(name, found)


def test_a_response_with_images_is_exported_and_restored(samplers):
    """Preempted by other weights, exported and restored, a response goes on with its images."""
    sampler = samplers("smolvlm")
    wanted = play(sampler, "smolvlm", groups=2)
    found = Play(sampler, "smolvlm", groups=2)
    for _ in range(TURNS - 1):
        for response in drive(found.scheduler).values():
            found.ended(response)
    scheduler = found.scheduler
    last = scheduler.step()
    scheduler.load(sampler.params, 1, cache="recompute")
    partials = scheduler.export()
    assert any(p.shown is not None and p.chunks for p in partials)
    scheduler.restore(partials)
    for response in [*last, *drive(scheduler).values()]:
        uid = response.prompt.counter, response.sample
        found.told[uid].add(response.tokens, response.logp, response.margin)
    assert_same(found.told, wanted)
    sampler.state = scheduler.close()
