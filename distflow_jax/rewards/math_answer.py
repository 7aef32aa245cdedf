"""Rewards for mathematical answers: the rule of this package, verl's and TRL's.

The text of the last box is cleaned by verl's rule for MATH, so that runs can be compared. The steps
are those of `is_equiv` of Hendrycks et al. 2021 (arxiv.org/abs/2103.03874), in its order.
"""

import contextlib
import importlib
import re
from typing import Any

from distflow_jax.parsing.checked_fields import is_missing
from distflow_jax.rewards.answers.equality import Equality, bounded, load
from distflow_jax.rewards.answers.final_answer import final_answer, last_box


def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    prompt: str = "",
    timeout_seconds: int = 3,
) -> float:
    r"""1.0 if the response's final answer equals the ground truth, else 0.0.

    answers/final_answer.py says what the answer is, answers/equality.py when two are equal. The
    truth may be LaTeX, plain text, or a solution with the answer at its end. A parse or comparison
    that takes longer than `timeout_seconds` of processor time counts as wrong. `prompt`: the text
    that the model was given, which may have opened its thought.

    Raises:
      ValueError: the ground truth is missing or cannot be parsed.
    """
    if is_missing(ground_truth):
        raise ValueError(f"math needs a ground truth, got {ground_truth!r}")
    equality = Equality(ground_truth, timeout_seconds)
    return float(equality.holds(final_answer(solution_str, prompt)))


def boxed_only(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> float:
    r"""verl's rule for MATH: the text of the last `\boxed{}` equals the truth, both cleaned.

    Hendrycks et al. 2021 (arxiv.org/abs/2103.03874), `is_equiv` of its repository.
    """
    box = last_box(solution_str)
    return float(box is not None and same_after_cleaning(box, str(ground_truth)))


def math_verify(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_seconds: int = 3,
) -> float:
    """The package math-verify with its default settings: the last expression of the response.

    A number that merely occurs is an answer here, also in a thought that is cut.

    Raises:
      ValueError: the ground truth cannot be parsed.
    """
    return _verified(solution_str, ground_truth, timeout_seconds)


def math_verify_anchored(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_seconds: int = 3,
) -> float:
    """math-verify with the settings of TRL's `accuracy_reward`: LaTeX in a box or after a phrase.

    Raises:
      ValueError: the ground truth cannot be parsed.
    """
    normal = importlib.import_module("latex2sympy2_extended").NormalizationConfig(units=True)
    config = load().LatexExtractionConfig(
        normalization_config=normal, boxed_match_priority=0, try_extract_without_anchor=False
    )
    options = {"extraction_config": [config], "extraction_mode": "first_match"}
    return _verified(solution_str, ground_truth, timeout_seconds, **options)


def _verified(solution: str, truth: Any, timeout_seconds: int, **options: Any) -> float:
    package, text = load(), str(truth)
    with bounded(timeout_seconds):
        gold = package.parse(text, parsing_timeout=None) if "$" in text or "boxed" in text else []
        gold = gold or package.parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    if is_missing(truth) or not gold:
        raise ValueError(f"math cannot parse the ground truth {truth!r}")
    with bounded(timeout_seconds):
        answer = package.parse(solution, parsing_timeout=None, **options)
    with bounded(timeout_seconds), contextlib.suppress(package.errors.TimeoutException):
        return float(package.verify(gold, answer, timeout_seconds=None))
    return 0.0


_REPLACED = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")),
    *(("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)
_LATER = (("\\%", ""), (" .", " 0."), ("{.", "{0."))
_BARE_ROOT = re.compile(r"\\sqrt(?!\{)(.)")
_BARE_FRACTION = re.compile(r"\\frac(?!\{)(.)(?:(?=\{)|(.))")
_QUOTIENT = re.compile(r"(-?\d+)/(-?\d+)")


def same_after_cleaning(one: str, other: str) -> bool:
    """Whether two texts are equal once their spelling is cleaned."""
    return _cleaned(one) == _cleaned(other)


def _cleaned(text: str) -> str:
    for old, new in _REPLACED:
        text = text.replace(old, new)
    if text.count("\\text{ ") == 1:  # a unit on the right
        text = text.split("\\text{ ")[0]
    for old, new in _LATER:
        text = text.replace(old, new)
    if text.startswith("."):
        text = f"0{text}"
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", "")
    text = _BARE_FRACTION.sub(lambda f: f"\\frac{{{f[1]}}}" + (f"{{{f[2]}}}" if f[2] else ""), text)
    if text == "0.5":
        return "\\frac{1}{2}"
    quotient = _QUOTIENT.fullmatch(text)
    return f"\\frac{{{quotient[1]}}}{{{quotient[2]}}}" if quotient else text
