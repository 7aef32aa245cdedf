"""`task:programs`: rows follow from options and row, and cases tell a program from shorter ones."""

import re

import pytest

from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.drawn.hash_stream import HashStream
from distflow_jax.data.operations import OPERATIONS, STARTS, Composition

ALL = ["task:programs", "task:programs?form=stdin&kinds=lists", "task:programs?begin=1&hints=1"]


def question(example):
    return example.prompt[0]["content"]


def composition_of(example):
    """The text that the split depends on: without examples and hints."""
    return re.split(r" and returns| and prints", question(example).partition("takes ")[2])[0]


@pytest.mark.parametrize("spec", ALL)
def test_a_row_is_a_function_of_options_and_row(spec):
    data, again = open_dataset(spec), open_dataset(spec)
    assert data.fingerprint == again.fingerprint
    assert [data[row] for row in (7, 3)] == [again[row] for row in (7, 3)]
    other = open_dataset(f"{spec}{'&' if '?' in spec else '?'}seed=1")
    assert other.fingerprint != data.fingerprint and other[3] != data[3]
    assert data[3].extra_info["index"] == 3 and data.place(3) == "task:programs, row 4"


def test_held_out_compositions_never_occur_in_training():
    training = [open_dataset(f"task:programs?seed={seed}&form=asserts") for seed in (0, 5)]
    held_out = open_dataset("task:programs?held_out=1&seed=5")
    seen = {composition_of(data[row]) for data in training for row in range(300)}
    hidden = {composition_of(held_out[row]) for row in range(300)}
    assert len(hidden) > 100 and not seen & hidden


@pytest.mark.parametrize("kind", STARTS)
def test_cases_tell_a_program_from_every_shorter_one(kind):
    for number in range(60):
        stream = HashStream(f"{kind}/{number}")
        composition = Composition.drawn(stream, stream.pick(STARTS[kind]), 3)
        if (cases := composition.cases(stream, 7)) is None:
            continue
        inputs, outputs = cases
        assert len(inputs) == len(outputs) == 7
        assert len(set(map(repr, inputs))) == 7 and len(set(map(repr, outputs))) >= 2
        assert outputs != inputs and composition.results(inputs) == outputs


def test_options():
    data = open_dataset("task:programs?operations=2-4&cases=5&shown=2&form=calls")
    for row in range(20):
        example = data[row]
        assert 2 <= example.extra_info["operations"] <= 4
        assert len(example.ground_truth["inputs"]) == 5
        assert question(example).count("For example, f(") == 2
    begun = open_dataset("task:programs?begin=1&hints=1&kinds=numbers")[0]
    assert begun.prompt[-1] == {"role": "assistant", "content": "```python\ndef f(n):\n    return"}
    whole = begun.prompt[-1]["content"] + begun.chosen
    assert whole == f"```python\n{begun.extra_info['reference']}\n```"
    assert " Use " in question(begun)


def test_every_operation_occurs():
    used = set()
    for kind in STARTS:
        data = open_dataset(f"task:programs?kinds={kind}&operations=2-3&shown=0")
        used |= {re.sub(r"\d+|'.'", "_", word) for row in range(300)
                 for word in composition_of(data[row]).split(", ")[1:]}  # fmt: skip
    words = {re.sub(r"\{\w\}|'\{\w\}'", "_", step.words).split(", ")[0] for step in OPERATIONS}
    assert words <= {re.sub("^then ", "", word).replace("'_'", "_") for word in used}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("operations=0", "operations must be like 2 or 1-3"),
        ("operations=3-2", "operations must be like 2 or 1-3"),
        ("kinds=sets", r"kinds must be some of strings\+lists"),
        ("form=call", "form must be"),
        ("cases=1", "cases must be"),
        ("case=3", "unknown option 'case'; did you mean 'cases'"),
    ],
)
def test_bad_options_name_the_option(option, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(f"task:programs?{option}")
