"""Samples of a checkpoint: what was saved comes back, to its own prompt, once."""

import contextlib
import json
import threading
import types
import weakref

import numpy as np
import pytest
from support.seeing import MODELS, seeing_prompt
from support.tiny_model import prompt_of

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import REASONS, Episode
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.rollout.requests import GroupRequest, Partial, Response, SamplingParams
from distflow_jax.stream.host_nodes import Group
from distflow_jax.stream.resume import SampleSaver, TokenAccount
from distflow_jax.stream.saved_samples import INDEX, SavedSamples, to_arrays
from distflow_jax.stream.schedule import Admission, Rule

LIMIT, SAMPLES = 20, 4


class InMemory:
    """An addition that was not written to a disk."""

    def __init__(self, arrays, facts):
        self._arrays, self.facts = arrays, json.loads(json.dumps(facts))

    def read(self, *names):
        return {name: self._arrays[name] for name in names}


def request_of(counter, samples=SAMPLES, limit=LIMIT):
    return GroupRequest(prompt_of(counter, [1, 2, 3]), SamplingParams(samples, limit))


def columns(rng, length):
    return (
        rng.integers(0, 500, length).astype(np.int32),
        rng.normal(size=length).astype(np.float32),
        rng.random(length).astype(np.float32),
        rng.integers(0, 9, length).astype(np.int32),
    )


def episode_of(rng, request, sample, *, experts=False):
    length = int(rng.integers(1, LIMIT))
    found = rng.integers(0, 8, (length + 3, 2, 2)).astype(np.int8) if experts else None
    tokens, logp, margin, version = columns(rng, length)
    response = Response(
        request.prompt,
        sample,
        tokens,
        logp,
        margin,
        finished=bool(rng.integers(2)),
        version=version,
        routed_experts=found,
    )
    return Episode(
        response,
        mask=rng.random(length) < 0.7,
        reward=float(rng.normal()),
        turns=int(rng.integers(1, 4)),
        reason=REASONS[int(rng.integers(len(REASONS)))],
        logged={"score": float(rng.normal())},
    )


def partial_of(rng, request, sample, fed):
    chunks = [columns(rng, 3), columns(rng, 2)] if sample else []
    return Partial(request, sample, np.arange(fed, dtype=np.int32), chunks)


def make(seed=0, first=0, step=1, experts=False):
    """Progress of two nodes on some prompts, whole and in part, and the requests."""
    rng = np.random.default_rng(seed)
    found, requests = {}, {}
    for counter in range(first, 6, step):
        for node in ("rollout", "baseline"):
            request = requests[counter, node] = request_of(counter)
            ended = int(rng.integers(0, SAMPLES + 1))
            progress = found[counter, node] = Progress()
            for sample in range(SAMPLES):
                if sample < ended:
                    progress.episodes[sample] = episode_of(rng, request, sample, experts=experts)
                else:
                    progress.partials.append(partial_of(rng, request, sample, fed=counter % 3))
    return found, requests


def saved(*progress):
    return SavedSamples([InMemory(*to_arrays(found)) for found in progress])


def asked(requests, counter):
    return {node: request for (c, node), request in requests.items() if c == counter}


def assert_same(got, wanted):
    assert got.episodes.keys() == wanted.episodes.keys()
    for sample, episode in wanted.episodes.items():
        mine = got.episodes[sample]
        for name in ("tokens", "logp", "margin", "version", "routed_experts"):
            value = getattr(episode.response, name)
            if value is None:
                assert getattr(mine.response, name) is None
            else:
                np.testing.assert_array_equal(getattr(mine.response, name), value)
                assert getattr(mine.response, name).dtype == value.dtype
        np.testing.assert_array_equal(mine.mask, episode.mask)
        for name in ("reward", "turns", "reason", "logged"):
            assert getattr(mine, name) == getattr(episode, name)
        assert mine.response.finished == episode.response.finished
        assert mine.response.prompt is episode.response.prompt
    assert len(got.partials) == len(wanted.partials)
    for mine, partial in zip(got.partials, wanted.partials, strict=True):
        assert mine.request is partial.request and mine.sample == partial.sample
        np.testing.assert_array_equal(mine.fed, partial.fed)
        np.testing.assert_array_equal(mine.tokens, partial.tokens)
    assert got.num_sampled == wanted.num_sampled


@pytest.mark.parametrize("experts", [False, True])
def test_what_was_saved_comes_back(experts):
    progress, requests = make(experts=experts)
    found = saved(progress)
    assert found.end == 6
    for counter in (3, 0, 5, 1, 2, 4):  # in any order
        assert counter in found
        got = found.take(counter, asked(requests, counter))
        for node, mine in got.items():
            assert_same(mine, progress[counter, node])
        assert counter not in found and found.take(counter, asked(requests, counter)) == {}
    assert found.end == 0 and found.left_out == 0


def test_any_process_takes_from_all_of_them():
    parts = [make(seed, first=seed, step=2) for seed in (0, 1)]
    found = saved(*(progress for progress, _ in parts))
    for counter in range(6):
        progress, requests = parts[counter % 2]
        for node, mine in found.take(counter, asked(requests, counter)).items():
            assert_same(mine, progress[counter, node])


def test_hosts_of_one_sampler_save_the_same():
    progress, requests = make()
    found = saved(progress, progress)
    assert found.take(2, asked(requests, 2)) and found.take(2, asked(requests, 2)) == {}


def test_what_nobody_asks_for_is_left_out():
    """A run that goes on with fewer or shorter responses, or without a node."""
    progress, _ = make()
    found = saved(progress)
    for counter in range(6):
        got = found.take(counter, {"rollout": request_of(counter, samples=2, limit=8)})
        assert set(got) <= {"rollout"}
        for mine in got.values():
            assert all(s < 2 and len(e.mask) <= 8 for s, e in mine.episodes.items())
            assert all(p.sample < 2 and len(p.tokens) < 8 for p in mine.partials)
    whole = sum(p.num_sampled for p in progress.values())
    assert 0 < found.left_out < whole + 1


def test_columns_of_several_lengths_are_refused():
    """They would give the numbers of one response to the next ones: when saved and when read."""
    rng, request = np.random.default_rng(0), request_of(1)
    partial = partial_of(rng, request, 1, fed=0)
    whole, facts = to_arrays({(1, "rollout"): Progress({}, [partial])})
    tokens, logp, margin, version = partial.chunks[0]
    partial.chunks[0] = (tokens[:-1], logp, margin, version)
    with pytest.raises(ValueError, match="response 1 of prompt 1 has columns of several lengths"):
        to_arrays({(1, "rollout"): Progress({}, [partial])})
    for name in ("logp", "margin", "version", "mask"):
        longer = whole | {name: np.concatenate([whole[name], whole[name][-1:]])}
        found = SavedSamples([InMemory(longer, facts)])
        with pytest.raises(ValueError, match=f"6 values of '{name}' for 5 tokens"):
            found.take(1, {"rollout": request})


def test_samples_of_other_processes_are_forgotten_and_freed():
    parts = [make(seed, first=seed, step=2) for seed in (0, 1)]
    additions = [InMemory(*to_arrays(progress)) for progress, _ in parts]
    alive = [weakref.ref(addition) for addition in additions]
    found = SavedSamples(additions)
    del additions
    progress, requests = parts[0]
    found.take(0, asked(requests, 0))
    found.keep({2, 9})
    assert 2 in found and found.end == 3 and 1 not in found
    assert [ref() is None for ref in alive] == [False, True]
    for node, mine in found.take(2, asked(requests, 2)).items():
        assert_same(mine, progress[2, node])
    assert alive[0]() is None and found.end == 0


@pytest.mark.parametrize("ends", [False, True])
def test_a_checkpoint_waits_for_the_group_in_the_place_of_a_prompt_that_is_given_up(ends):
    """It has the two groups of step 2: 2 is done, and 4 takes the place of 3 once all know of it,
    unless the run ends before."""
    rng, groups, added = np.random.default_rng(0), {}, []

    def done(counter):
        episode = episode_of(rng, request_of(counter), 0)
        groups[counter] = Group(counter, None, set(), {"gen": [episode]}, done=True)

    admission = Admission(Rule(2, max_staleness=1), exact=True)
    producer = types.SimpleNamespace(
        lock=threading.Condition(),
        admission=admission,
        groups=groups,
        begun_up_to=lambda end: all(c in groups or c == 3 for c in range(2, end)),
        facts=lambda: {},
        saved=SavedSamples(),
        under_way=0,
    )
    writer = types.SimpleNamespace(add=lambda step, arrays, facts: added.append((step, arrays)))
    saver = SampleSaver(producer, writer, None, TokenAccount(), steps=1)
    admission.finish(1)
    groups[2] = Group(2, None, set())
    groups[3] = Group(3, None, set(), done=True, given_up=True)
    saver.save(1, contextlib.nullcontext())
    done(2)
    saver.add_complete()
    assert not added and not saver.settled
    if not ends:
        admission.judge(3, False)
        del groups[3]
        saver.add_complete()
        assert not added
        done(4)
        saver.add_complete()
    else:
        saver.end()
    ((step, arrays),) = added
    assert step == 1 and saver.settled
    assert arrays["index"][:, INDEX.index("counter")].tolist() == ([2] if ends else [2, 4])


def test_nothing_saved():
    assert SavedSamples().end == 0 and 0 not in SavedSamples()
    assert SavedSamples().take(0, {"rollout": request_of(0)}) == {}
    assert saved({}).end == 0


def test_images_of_responses_come_back():
    """Only where a response has some does a checkpoint say anything of images."""
    rng, request = np.random.default_rng(0), request_of(1)
    prompt = seeing_prompt(MODELS["qwen2_5_vl"], 1, 2)
    shown = TurnImages(prompt.images, prompt.patch)
    episodes = {sample: episode_of(rng, request, sample) for sample in range(2)}
    partial = partial_of(rng, request, 2, fed=len(shown.patch))
    progress = Progress(dict(episodes), [partial])
    arrays, facts = to_arrays({(1, "rollout"): progress})
    assert facts == {"nodes": ["rollout"]} and not any("image" in name for name in arrays)
    episodes[1].response.shown = partial.shown = shown
    request = request_of(1, limit=LIMIT + len(shown.patch))
    saved = SavedSamples([InMemory(*to_arrays({(1, "rollout"): progress}))])
    found = saved.take(1, {"rollout": request})["rollout"]
    assert found.episodes[0].response.shown is None
    for other in (found.episodes[1].response.shown, found.partials[0].shown):
        assert shown.same_as(other) and other.same_as(shown)
        for one, two in zip(shown.cut, other.cut, strict=True):
            assert (one.features, one.grid) == (two.features, two.grid)
            for name in ("patches", "positions", "segments"):
                np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
                assert getattr(one, name).dtype == getattr(two, name).dtype
