"""Observations with pictures: their tokens and places, and one clear line for what cannot be."""

import contextlib
import queue

import numpy as np
import PIL.Image
import pytest
from support.seeing import TOWER
from support.tiny_model import prompt_of
from support.waiting import HANG

from distflow_jax.environments.environment import Shown, Turn
from distflow_jax.environments.failures import CallFailure
from distflow_jax.environments.handle import EnvironmentHandle, check_environments
from distflow_jax.environments.observed_pictures import ImageSupport
from distflow_jax.environments.registry import CallLimits, Environments
from distflow_jax.images.placing import SeeingTokenizer
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.vision.image_layout import image_layout
from distflow_jax.stream.frames.environment_frames import answers_frame, answers_of, returned
from distflow_jax.stream.frames.frames import Frame

TOKENIZER = Tokenizer.byte_level(320)
SIGHT = ImageSupport(SeeingTokenizer(TOKENIZER, image_layout(TOWER, TOKENIZER, 0)), most=12)
FEATURES = TOWER.grid**2 // TOWER.merge**2
PICTURE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


class Shows:
    """Returns the observation that it is made with."""

    def __init__(self, tokenizer, *, observation=None):
        self.observation = observation

    def reset(self, prompt):
        return self.observation

    def step(self, tokens, text):
        return Turn(self.observation)


def environments(observation=None, sight=SIGHT):
    kwargs = {"observation": observation}
    return Environments(f"{__name__}:Shows", kwargs, TOKENIZER, calls=CallLimits(HANG), sight=sight)


def test_pictures_stand_where_the_text_says():
    picture = PIL.Image.fromarray(PICTURE[:, ::-1])
    observed = environments().observed(Turn(Shown("a<image>bc<image>", [PICTURE, picture])))
    patch, shown = observed.shown.patch, observed.shown
    assert len(patch) == len(observed.tokens) == 3 + 2 * FEATURES
    assert patch.tolist() == [-1, *range(FEATURES), -1, -1, *range(FEATURES, 2 * FEATURES)]
    assert TOKENIZER.decode(observed.tokens[patch < 0]) == "abc"
    assert [cut.features for cut in shown.cut] == [FEATURES] * 2
    assert shown.images[0].digest != shown.images[1].digest
    again = environments().observed(Turn(Shown("a<image>bc<image>", [PICTURE, picture])))
    assert shown.same_as(again.shown)
    other = environments().observed(Turn(Shown("a<image>bc<image>", [PICTURE, PICTURE])))
    assert not shown.same_as(other.shown)
    assert [n for *_, n in shown.keys] == [0, 0] and [n for *_, n in other.shown.keys] == [0, 1]


@pytest.mark.parametrize("role", [None, "user"])
def test_pictures_that_cross_the_wire_are_observed_alike(role):
    pictures = [PICTURE, PIL.Image.fromarray(PICTURE[:, ::-1])]
    turn = Turn(Shown("a<image>bc<image>", pictures, role), 1.5, logged={"shown": 2})
    sent = answers_frame([(1, returned(turn), False)])
    (answer,) = answers_of(Frame.of_bytes(sent.to_bytes()))
    here, there = (environments().observed(one) for one in (turn, answer.outcome))
    assert there.looks_like(here) and there.shown.same_as(here.shown)
    assert (there.reward, there.logged) == (here.reward, here.logged)


@pytest.mark.parametrize(
    "picture, why",
    [
        (PICTURE.astype(np.float32), "image 1 of an observation's 1: "),
        (PICTURE[..., 0], "image 1 of an observation's 1: "),
        (PICTURE[:0], "image 1 of an observation's 1: "),
    ],
)
def test_pictures_of_another_form_are_refused_where_they_arrive(picture, why):
    sent = answers_frame([(1, returned(Shown("<image>", [picture])), False)])
    (answer,) = answers_of(Frame.of_bytes(sent.to_bytes()))
    with pytest.raises(ValueError, match=why):
        environments().first(answer.outcome)


def test_what_is_transparent_is_white_as_in_files():
    clear = PIL.Image.new("RGBA", (30, 20), (0, 0, 0, 0))
    white = np.full((20, 30, 3), 255, np.uint8)
    one, other = (environments().observed(Turn(Shown("<image>", [p]))) for p in (clear, white))
    assert one.shown.same_as(other.shown)


def test_a_turn_of_the_chat_template_has_pictures():
    found = environments().observed(Turn(Shown("<image>go", [PICTURE], role="user")))
    text = TOKENIZER.encode_turn("go")
    assert TOKENIZER.decode(found.tokens[found.shown.patch < 0], skip_special=False) == (
        TOKENIZER.decode(text, skip_special=False)
    )
    at = np.flatnonzero(found.shown.patch >= 0)
    assert at.tolist() == list(range(at[0], at[0] + FEATURES))
    assert TOKENIZER.decode(found.tokens[at[-1] + 1 :][:2]) == "go"


def test_text_that_spells_a_place_is_text():
    told = environments(sight=None).observed(Turn("an <image> in prose"))
    assert told.shown is None and TOKENIZER.decode(told.tokens) == "an <image> in prose"
    plain = environments(sight=None).observed(Turn(Shown("no picture")))
    assert plain.shown is None and TOKENIZER.decode(plain.tokens) == "no picture"
    turn = environments(sight=None).observed(Turn(Shown("go", role="user")))
    np.testing.assert_array_equal(turn.tokens, TOKENIZER.encode_turn("go"))


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (Shown("<image><image>", [PICTURE]), "has 2 <image> in its text for 1 images: write one"),
        (Shown("", [PICTURE]), "an observation has 0 <image> in its text for 1 images"),
        (Shown([1, 2], [PICTURE]), "with 1 images has list in place of its text: images stand in"),
        ([1, PICTURE, 2], "must be text, token ids, or Shown(text, images) with pictures, got ["),
        (PICTURE, "an observation must be text, token ids, or Shown(text, images)"),
        (Shown("<image>", ["a.png"]), "image 1 of an observation's 1: an image is uint8 [height,"),
        (Shown("<image>", [PICTURE / 2]), "an image is uint8 [height, width, 3], got float64 [20"),
        (Shown("<image>", [PICTURE[:1]]), "has 30 x 1 pixels: a side needs at least 2"),
        (
            Shown("<image>" * 4, [PICTURE] * 4),
            "an observation's 4 images have 16 features, and those of a turn may have at most "
            "data.max_prompt_length=12: show fewer or smaller ones",
        ),
    ],
)
@pytest.mark.parametrize("method", ["reset", "step"])
def test_one_line_says_what_is_wrong(observation, message, method):
    assert message in failed(environments(observation), method)


def failed(found, method):
    """The line of the failure of a call."""
    answers = queue.SimpleQueue()
    with contextlib.closing(found):
        handle = EnvironmentHandle(found, None, answers)
        handle.reset()
        outcome = answers.get(timeout=HANG).outcome
        if method == "step":
            handle.step(np.zeros(1, np.int32))
            outcome = answers.get(timeout=HANG).outcome
    assert isinstance(outcome, CallFailure)
    (line, *_) = outcome.error.split("\n")
    assert "observed_pictures.py" not in line and "registry.py" not in line
    return line


def test_a_model_without_a_tower_is_shown_nothing():
    with pytest.raises(ValueError) as error:
        with contextlib.closing(environments(Shown("<image>", [PICTURE]), sight=None)) as found:
            check_environments(found, prompt_of(0, [1]))
    wanted = (
        "ValueError: an observation has 1 images, and the model has no vision tower: use a model"
    )
    assert wanted in str(error.value) and "\n" not in str(error.value)
