"""Frames of prompts with images: what comes back, how often it is sent, and what is refused."""

import dataclasses

import numpy as np
import pytest
from support.seeing import MODELS, seeing_prompt
from support.tiny_model import prompt_of
from support.waiting import HANG

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.images.prompt_images import prompt_images
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.stream.frames import image_frames
from distflow_jax.stream.frames.frames import Frame, work_frame, work_of
from distflow_jax.stream.frames.prompt_frames import request_bytes
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.task_buffer import ANSWER_BYTES, TaskBuffer
from distflow_jax.stream.tasks import GroupTask

MODEL = MODELS["qwen2_5_vl"]


def frame_of(*prompts):
    work = [
        ((p.counter, "gen"), GroupRequest(p, SamplingParams(2, 16)), Progress()) for p in prompts
    ]
    return work_frame({"newest": 1}, work)


def received(frame):
    return [request.prompt for _, request, _ in work_of(Frame.of_bytes(frame.to_bytes()))]


@pytest.mark.parametrize("family", sorted(MODELS))
def test_images_come_back_as_the_sampler_reads_them(family):
    sent = [seeing_prompt(MODELS[family], counter, counter % 3) for counter in range(5)]
    for one, other in zip(sent, received(frame_of(*sent)), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert [i.digest for i in one.images] == [i.digest for i in other.images]
        ours, theirs = (prompt_images(p.images, p.patch) for p in (one, other))
        assert (ours is None) == (theirs is None) == (not one.images)
        if ours is not None:
            for name in ("patch", "patches", "positions", "segments", "rotary", "count"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_an_image_of_several_prompts_is_sent_once_and_text_sends_none():
    prompt = seeing_prompt(MODEL, 0, 2)
    again = [dataclasses.replace(prompt, counter=counter) for counter in range(4)]
    one, four = (len(frame_of(*p).to_bytes()) for p in (again[:1], again))
    assert four - one < image_frames.sent_bytes(prompt)
    frame = frame_of(*again)
    assert len(frame.facts["images"]) == 2 and len(received(frame)[3].images) == 2
    text = frame_of(prompt_of(1, [1, 2, 3]))
    assert "images" not in text.facts and "images" not in text.facts["groups"][0]
    assert received(text)[0].patch is None


def test_environments_get_the_row_of_a_prompt_and_previews_and_samplers_alone_do_not():
    prompt = dataclasses.replace(
        seeing_prompt(MODEL, 0, 2),
        text="What?",
        data_source="games",
        ground_truth=("left", 2),
        extra_info={"board": np.arange(4)},
        messages=[{"role": "user", "content": "What?"}],
    )
    work = [((0, "gen"), GroupRequest(prompt, SamplingParams(2, 16)), Progress())]
    (whole,) = received(work_frame({}, work, rows=True))
    assert (whole.text, whole.data_source, whole.ground_truth) == ("What?", "games", ("left", 2))
    np.testing.assert_array_equal(whole.extra_info["board"], np.arange(4))
    assert whole.messages == prompt.messages
    for sent, got in zip(prompt.images, whole.images, strict=True):
        np.testing.assert_array_equal(sent.pixels, got.pixels)
    (bare,) = received(work_frame({}, work))
    assert (bare.text, bare.ground_truth, dict(bare.extra_info)) == ("", None, {})
    assert bare.messages is None
    assert not any(image.pixels.size for image in bare.images)
    odd = dataclasses.replace(prompt, extra_info={"board": object()})
    with pytest.raises(ValueError, match="extra_info of row .* type object, which cannot be sent"):
        request_bytes(odd, rows=True)
    assert request_bytes(prompt, rows=True) > request_bytes(odd, rows=False) > 0


def _column(name, change):
    def edit(facts, arrays):
        arrays[name] = change(arrays[name].copy())

    return edit


def _fact(name, value):
    def edit(facts, arrays):
        facts["images"][0][name] = value

    return edit


def _without(name):
    return lambda facts, arrays: arrays.pop(name)


def _other_place(patch):
    patch[np.flatnonzero(patch >= 0)[:2]] = [1, 0]
    return patch


def _with_text_within(patch):
    at = np.flatnonzero(patch >= 0)
    patch[at[-1] + 1], patch[at[-1]] = patch[at[-1]], -1
    return patch


MALFORMED = {
    "patches of floats": _column("image0.patches", lambda x: x.astype(np.float32)),
    "flat patches": _column("image0.patches", np.ravel),
    "no patches": _column("image0.patches", lambda x: x[:0]),
    "fewer patches": _column("image0.patches", lambda x: x[:-1]),
    "missing patches": _without("image0.patches"),
    "positions of four": _column("image0.positions", lambda x: np.repeat(x, 2, axis=1)),
    "positions below 0": _column("image0.positions", lambda x: x - 1),
    "segments from 0": _column("image0.segments", lambda x: x - 1),
    "large segments": _column("image0.segments", lambda x: x + 10**6),
    "longer segments": _column("image0.segments", lambda x: np.append(x, x[-1])),
    "no features": _fact("features", 0),
    "many features": _fact("features", 1 << 40),
    "fewer features": _fact("features", 1),
    "a large grid": _fact("grid", [1 << 40, 1]),
    "a grid of three": _fact("grid", [1, 1, 1]),
    "a digest that is none": _fact("digest", "xyz"),
    "a short digest": _fact("digest", "00"),
    "a number of no image": lambda facts, arrays: facts["groups"][0].update(images=[9]),
    "images that are none": lambda facts, arrays: facts.update(images=3),
    "a missing patch": _without("patch0"),
    "a short patch": _column("patch0", lambda x: x[:-1]),
    "a patch of long integers": _column("patch0", lambda x: x.astype(np.int64)),
    "features out of order": _column("patch0", _other_place),
    "text within an image": _column("patch0", _with_text_within),
    "tokens of two axes": _column("prompt0", lambda x: x[None]),
    "tokens of floats": _column("prompt0", lambda x: x.astype(np.float32)),
}


@pytest.mark.parametrize("edit", MALFORMED.values(), ids=MALFORMED)
def test_sizes_that_do_not_belong_together_are_refused(edit):
    prompt = next(
        p for c in range(20) if (p := seeing_prompt(MODEL, c, 1)).images[0].patches.features > 2
    )
    frame = Frame.of_bytes(frame_of(prompt).to_bytes())
    facts, arrays = dict(frame.facts), dict(frame.arrays)
    edit(facts, arrays)
    with pytest.raises(ValueError):
        work_of(Frame(facts, arrays))


def test_one_answer_has_no_more_groups_than_a_frame_may_hold():
    buffer = TaskBuffer(Rule(8, 1), exact=False, version=0, lease_seconds=HANG, max_tries=2)
    for counter in range(5):
        size = ANSWER_BYTES // 2
        key = (counter, "gen")
        task = GroupTask(key=key, content=None, step=1, samples=range(2), size=size)
        buffer.begin_group(task, {})
    assert [len(buffer.lease("a", 0, 100, 0.0)) for _ in range(4)] == [2, 2, 1, 0]


def test_images_that_no_frame_holds_are_named(monkeypatch):
    prompt = seeing_prompt(MODEL, 3, 1)
    size = image_frames.sent_bytes(prompt)
    monkeypatch.setattr(image_frames, "MOST_IMAGE_BYTES", size - 1)
    with pytest.raises(ValueError, match="images of prompt 3 .* smaller data.image_tokens"):
        image_frames.sent_bytes(prompt)
