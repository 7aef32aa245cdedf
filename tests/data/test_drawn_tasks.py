"""Drawn tasks: a row is a function of (options, row), and answers are as frequent as promised."""

import collections

import numpy as np
import pytest
from support.plain_layout import PlainLayout

from distflow_jax.config.data_config import DataConfig
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.drawn.drawn_task import COLOURS
from distflow_jax.data.loader import Loader
from distflow_jax.images import pillow
from distflow_jax.images.placing import SeeingTokenizer
from distflow_jax.images.record import image_of
from distflow_jax.models.tokenizer import Tokenizer

ALL = [
    *("task:shapes", "task:shapes?ask=colour", "task:shapes?ask=position"),
    "task:walk",
]


def content(example):
    return example.prompt, example.ground_truth, example.images[0].pixels().tobytes()


def with_option(spec, option):
    return f"{spec}{'&' if '?' in spec else '?'}{option}"


@pytest.mark.parametrize("spec", ALL)
def test_a_row_is_a_function_of_options_and_row(spec):
    data, again = open_dataset(spec), open_dataset(spec)
    assert data.fingerprint == again.fingerprint
    assert [content(data[row]) for row in (7, 3)] == [content(again[row]) for row in (7, 3)]
    other = open_dataset(with_option(spec, "seed=1"))
    assert other.fingerprint != data.fingerprint and content(other[3]) != content(data[3])
    example = data[3]
    assert example.prompt[-1]["content"][0] == {"type": "image"}
    assert example.images[0].size() == example.images[0].pixels().shape[:2]
    assert example.images[0].place == f"{spec.partition('?')[0]}, row 4, image 1"
    assert example.chosen == example.ground_truth != example.rejected


@pytest.mark.parametrize("spec", ALL)
def test_held_out_pictures_never_occur_in_training(spec):
    rows = range(300)
    training, other = open_dataset(spec), open_dataset(with_option(spec, "seed=5"))
    held_out = open_dataset(with_option(spec, "held_out=1&seed=5"))
    seen = {image_of(data[r].images[0].pixels()).digest for data in (training, other) for r in rows}
    hidden = {image_of(held_out[row].images[0].pixels()).digest for row in rows}
    assert len(hidden) > 290 and not seen & hidden


@pytest.mark.parametrize(
    ("spec", "answers"),
    [
        ("task:shapes", "1 2 3 4"),
        ("task:shapes?most=6", "1 2 3 4 5 6"),
        ("task:shapes?ask=colour", "red green blue yellow"),
        ("task:shapes?ask=position", "left right top bottom"),
        ("task:walk", "up down left right"),
        ("task:walk?cells=2", "up down left right"),
    ],
)
@pytest.mark.parametrize("held_out", [0, 1])
def test_answers_are_equally_frequent(spec, answers, held_out):
    data = open_dataset(with_option(spec, f"held_out={held_out}"))
    found = collections.Counter(data[row].ground_truth for row in range(600))
    assert set(found) == set(answers.split())
    share = 600 / len(found)
    assert all(abs(count - share) < 5 * share**0.5 for count in found.values())


def test_pictures_have_many_sizes_within_the_bounds():
    data = open_dataset("task:shapes?sides=40-60")
    sizes = {data[row].images[0].size() for row in range(300)}
    assert len(sizes) > 150
    assert all(40 <= side <= 60 for size in sizes for side in size)
    assert {open_dataset("task:walk?sides=64")[r].images[0].size() for r in range(9)} == {(64, 64)}


def test_the_picture_shows_the_answer():
    """Counted and located by its pixels, the shape is where and what the answer says."""
    colour = open_dataset("task:shapes?ask=colour")
    for row in range(40):
        example = colour[row]
        pixels = example.images[0].pixels().reshape(-1, 3).astype(int)
        inside = (np.abs(pixels - COLOURS[example.ground_truth]).sum(1) == 0).sum()
        assert inside >= 9
    position = open_dataset("task:shapes?ask=position")
    for row in range(40):
        example = position[row]
        pixels = example.images[0].pixels().astype(int)
        y, x = np.nonzero(np.abs(pixels - pixels[0, 0]).sum(2))
        away = np.array([y.mean(), x.mean()]) / pixels.shape[:2] - 0.5
        vertical = abs(away[0]) > abs(away[1])
        names = ("top", "bottom") if vertical else ("left", "right")
        assert names[int(away[int(not vertical)] > 0)] == example.ground_truth
    count = open_dataset("task:shapes?most=9")
    for row in range(40):
        example = count[row]
        pixels = example.images[0].pixels().astype(int)
        shapes = np.abs(pixels - np.array(ground(pixels))).sum(2) > 0
        assert islands(shapes) == int(example.ground_truth)


def ground(pixels):
    values, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    return values[counts.argmax()]


def islands(mask):
    """Connected groups of true pixels, diagonals included."""
    left, count = set(zip(*np.nonzero(mask), strict=True)), 0
    while left:
        count += 1
        todo = [left.pop()]
        while todo:
            y, x = todo.pop()
            near = {(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            todo += near
    return count


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("task:shapes?ask=colours", "task:shapes: ask must be one of count, colour, position, got"),
        ("task:shapes?most=10", "task:shapes: most must be from 2 to 9, got 10"),
        ("task:shapes?sides=10-20", "task:shapes sides must be like 64 or 32-96, from 24 to 2048"),
        ("task:shapes?sides=big", "task:shapes sides must be like 64 or 32-96, .* got 'big'"),
        ("task:walk?sides=64-32", "task:walk sides must be like"),
        ("task:walk?size=0", "task:walk: size must be at least 1, got 0"),
        ("task:walk?bars=3", "unknown option 'bars'"),
        ("task:walk?cells=9", "task:walk cells must be from 2 to 5, a sixth of the least side"),
        (
            "task:photos",
            "unknown task 'photos' .* known: arithmetic, programs, shapes, walk",
        ),
    ],
)
def test_bad_options_name_the_option(spec, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(spec)


def test_another_pillow_is_named_at_a_resume(monkeypatch):
    """Its pictures may be others, so the rows are."""
    spec = "task:shapes?size=20"
    tokenizer = SeeingTokenizer(Tokenizer.byte_level(300), PlainLayout())

    def loader():
        config = DataConfig(prompts_per_step=4, max_prompt_length=2048)
        return Loader(open_dataset(spec), tokenizer, config, seed=0)

    first = loader()
    state, known = first.state(4), pillow.load().__version__
    assert state["made_by"] == f"pillow=={known}"
    loader().restore(state)
    monkeypatch.setattr(pillow.load(), "__version__", "99.0")
    named = f"made by pillow=={known}, and pillow==99.0 is installed: pip install pillow=={known},"
    with pytest.raises(ValueError, match=f"trained on other data: fingerprint .*{named}"):
        loader().restore(state)
    del state["made_by"]  # of an older version
    with pytest.raises(ValueError, match="or the version of before where another than pillow==99"):
        loader().restore(state)


def test_a_question_of_ones_own_and_the_words_around_it():
    data = open_dataset(
        "task:shapes?question=How%20many?", system_prompt="Look.", prompt_suffix=" Number:"
    )
    assert data[0].prompt == [
        {"role": "system", "content": "Look."},
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "How many? Number:"}],
        },
    ]
