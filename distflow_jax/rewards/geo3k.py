r"""The rule of verl for Geometry3K: `<think>...</think>`, then an answer in `\boxed{}`."""

from typing import Any

from distflow_jax.rewards import math_answer
from distflow_jax.rewards.answers import final_answer
from distflow_jax.rewards.text_rules import with_opened_tag


def geo3k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    prompt: str = "",
    boxed: bool = True,
    format_weight: float = 0.1,
    timeout_seconds: int = 3,
) -> float:
    r"""A weighted sum of a right answer, by the rule of `math`, and of the form.

    The answer is that in the last `\boxed{}` after the thought; with `boxed=False` it is that
    of `math`. The form, worth `format_weight`, is `<think>...</think>` at the start, which the
    prompt may have opened, and a `\boxed{}` after it.

    Raises:
      ValueError: the ground truth cannot be parsed, or the weight is not from 0 to 1.
    """
    if not 0 <= format_weight <= 1:
        raise ValueError(f"geo3k format_weight must be from 0 to 1, got {format_weight}")
    box = final_answer.boxed(final_answer.after_thought(solution_str, prompt))
    given = "" if box is None else f"\\boxed{{{box}}}"
    right = math_answer.math(
        data_source,
        given if boxed else solution_str,
        ground_truth,
        extra_info,
        prompt="" if boxed else prompt,
        timeout_seconds=timeout_seconds,
    )
    return (1 - format_weight) * right + format_weight * has_form(solution_str, prompt)


def has_form(text: str, prompt: str = "") -> bool:
    r"""Whether a text is `<think>...</think>` and has a whole `\boxed{}` after that."""
    text = with_opened_tag(text, "think", prompt)
    _, closed, after = text.partition("</think>")
    return (
        text.lstrip().startswith("<think>")
        and bool(closed)
        and final_answer.boxed(after) is not None
    )
