"""The built-in reward functions give the scores a person would."""

import numpy as np
import pytest

from distflow_jax.rewards.math_answer import math
from distflow_jax.rewards.text_rules import exact, gsm8k, pattern_format, tagged_format
from distflow_jax.stages.reward import overlong_penalty


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("47", "47", 1),
        ("12 + 35 = 47.", "47", 1),
        ("12+35=47", "47", 1),
        ("12-35", "35", 1),  # a subtraction, no sign
        ("12 - 35 = -23", "-23", 1),
        ("12 - 35 = \N{MINUS SIGN}23", -23, 1),
        ("12 - 35 = 23", "-23", 0),
        ("It costs $1,234.50 in all.", "1234.5", 1),
        ("-$5", "-5", 1),
        ("first 1,2,3", "3", 1),
        ("1,234,567", "1234567", 1),
        ("47.0", "47", 1),
        ("0.1", "0.10", 1),
        (".5", "0.5", 1),
        ("The answer is **47**", "47", 1),
        ("47 or 48", "47", 0),
        ("no number", "47", 0),
        ("", "47", 0),
        ("So #### 47\nThat took 3 steps", "47", 1),  # what was marked as the answer counts
        ("#### $1,000", "#### 1000", 1),
        ("9007199254740993", "9007199254740992", 0),  # equal as floats
        (r"It is \boxed{5}. This took 50 minutes.", "5", 1),
        (r"It is \boxed{5}. This took 50 minutes.", "50", 0),
        ("36 cm^2", "36", 1),
        (r"36\text{ cm}^{2}", "36", 1),
        ("36 m3", "36", 1),
        ("0.5", "1/2", 1),
        ("3/2", "1/2", 0),
        (r"\frac{3}{4}", "4", 0),
        ("5/2/2020", "2020", 1),
        ("1e3", "1000", 1),
        ("1" * 5000, "1e999", 0),
        ("–５", "-5", 1),
    ],
)
def test_gsm8k_flexible(solution, truth, score):
    assert gsm8k("s", solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "score"),
    [("#### 47", 1), ("####47", 1), ("#### 3\n#### 47", 1), ("47", 0), ("#### none, 47", 0)],
)
def test_gsm8k_strict(solution, score):
    assert gsm8k("s", solution, "47", method="strict") == score


def test_gsm8k_refuses_what_it_cannot_judge():
    with pytest.raises(ValueError, match="number as ground truth, got 'north'"):
        gsm8k("s", "47", "north")
    with pytest.raises(ValueError, match="flexible, strict, got 'loose'"):
        gsm8k("s", "47", "47", method="loose")


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        ("The answer is $1/3$", r"\frac{1}{3}", 1),
        (r"\boxed{18.90}", r"\$18.90", 1),  # a sign of money, which begins no formula
        (r"\boxed{\$18.90}", r"\$18.90", 1),
        (r"\boxed{18.91}", r"\$18.90", 0),
        (r"\boxed{32348}", r"\$32,\!348", 1),
        (r"\boxed{36}", "$36", 1),
        (r"\boxed{36}", r"$\$36$", 1),
        (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1),
        (r"\boxed{2}", "3", 0),
        ("I do not know", "3", 0),
    ],
)
def test_math_compares_expressions(solution, truth, score):
    assert math("s", solution, truth) == score


def test_exact():
    assert exact("s", " Paris\n", "Paris") == 1
    assert exact("s", " Paris", "Paris", strip=False) == 0
    assert exact("s", "paris", "Paris") == 0
    assert exact("s", "paris", "Paris", casefold=True) == 1
    assert exact("s", "b", ["a", "b"]) == 1


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("<think>2+2</think><answer>4</answer>", 1),
        ("<think>a\nb</think>\n <answer>4</answer>\n", 1),
        ("<think></think><answer>4</answer>", 0),
        ("<answer>4</answer><think>2+2</think>", 0),
        ("<think>x</think><answer>4</answer> and more", 0),
        ("<think>x</think>text<answer>4</answer>", 0),
        ("<think>x<think>y</think></think><answer>4</answer>", 0),
        ("4", 0),
    ],
)
def test_tagged_format(solution, score):
    assert tagged_format("s", solution, None) == score


def test_pattern_format_matches_the_whole_response():
    assert pattern_format("s", "answer: 4\n", None, pattern=r"answer: \d+") == 1
    assert pattern_format("s", "the answer: 4", None, pattern=r"answer: \d+") == 0


def test_overlong_penalty_of_dapo():
    lengths = np.array([0, 80, 90, 100, 120])
    penalty = overlong_penalty(lengths, max_response_length=100, buffer=20)
    np.testing.assert_allclose(penalty, [0, 0, -0.5, -1, -2])
    assert penalty.dtype == np.float32
    capped = overlong_penalty(lengths, max_response_length=100, buffer=20, factor=3.0, cap=True)
    np.testing.assert_allclose(capped, [0, 0, -1, -1, -1])
