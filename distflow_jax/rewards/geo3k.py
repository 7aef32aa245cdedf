r"""The rule of verl for Geometry3K: `<think>...</think>`, then an answer in `\boxed{}`."""

import re
from typing import Any

from distflow_jax.rewards import math_answer

_BOX = r"\boxed{"
_BRACES = re.compile(r"\\boxed\{|\{|\}")


def geo3k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    boxed: bool = True,
    format_weight: float = 0.1,
    timeout_seconds: int = 3,
) -> float:
    r"""A weighted sum of a right answer, by the rule of `math`, and of the form.

    The answer is that in the last `\boxed{}`; with `boxed=False` it is the whole response's. The
    form, worth `format_weight`, is `<think>...</think>` at the start and a `\boxed{}` after it.

    Raises:
      ValueError: the ground truth cannot be parsed, or the weight is not from 0 to 1.
    """
    if not 0 <= format_weight <= 1:
        raise ValueError(f"geo3k format_weight must be from 0 to 1, got {format_weight}")
    answer = last_boxed(solution_str)
    given = f"{_BOX}{answer}}}" if answer is not None else ""
    right = math_answer.math(
        data_source,
        given if boxed else solution_str,
        ground_truth,
        extra_info,
        timeout_seconds=timeout_seconds,
    )
    return (1 - format_weight) * right + format_weight * has_form(solution_str)


def has_form(text: str) -> bool:
    r"""Whether a text is `<think>...</think>` and has a whole `\boxed{}` after that."""
    _, closed, after = text.partition("</think>")
    return text.lstrip().startswith("<think>") and bool(closed) and last_boxed(after) is not None


def last_boxed(text: str) -> str | None:
    r"""The content of the last whole `\boxed{}` of a text; None without one.

    >>> last_boxed(r"\boxed{1} or \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    opened: list[tuple[int, bool]] = []  # where the content of a brace begins, whether it is a box
    start, found = -1, None
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[0] == _BOX))
        elif opened:
            begin, is_box = opened.pop()
            if is_box and begin > start:
                start, found = begin, text[begin : brace.start()]
    return found
