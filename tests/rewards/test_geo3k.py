"""geo3k: an answer in the last box, and the form around it."""

import pytest

from distflow_jax.rewards.geo3k import geo3k, has_form

RIGHT = r"<think>ten halves</think> It is \boxed{\frac{10}{2}}."


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (RIGHT, 1.0),
        (r"\boxed{5}", 0.9),
        (r"<think>ten</think> \boxed{4}", 0.1),
        (r"<think>ten</think> 5", 0.0),
        (r"<think>\boxed{5}</think> five", 0.0),  # a box in the thought is no answer
        (r"<think>it is \boxed{5}", 0.0),
        (r"\boxed{4} or rather \boxed{5.0}", 0.9),
        ("5", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_counts_nine_parts_and_its_form_one(response, score):
    assert geo3k("", response, "5") == pytest.approx(score)


def test_a_truth_in_dollars():
    assert geo3k("", r"\boxed{18.90}", r"\$18.90") == pytest.approx(0.9)


def test_options():
    assert geo3k("", "the answer is $5$", "5", boxed=False) == pytest.approx(0.9)
    assert geo3k("", RIGHT, "4", format_weight=0.5) == 0.5
    with pytest.raises(ValueError, match="format_weight must be from 0 to 1, got 2"):
        geo3k("", RIGHT, "5", format_weight=2)


def test_form():
    assert has_form(" " + RIGHT) and not has_form("So: " + RIGHT)
    opened = RIGHT.removeprefix("<think>")
    assert not has_form(opened) and has_form(opened, "user: 10/2?\nassistant: <think>\n")
