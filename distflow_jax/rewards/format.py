"""Rewards for the format of a response, whatever its content."""

import re
from collections.abc import Sequence
from typing import Any


def tagged_format(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    prompt: str = "",
    tags: Sequence[str] = ("think", "answer"),
) -> float:
    """1.0 if the response is `<think>..</think><answer>..</answer>` and nothing else, else 0.0.

    Each tag must occur once, in the order of `tags`, and enclose some text; white space may stand
    between them. The end of `prompt` may have opened the first one. DeepSeek-AI 2025,
    arxiv.org/abs/2501.12948, sec. 2.2.
    """
    solution_str = with_opened_tag(solution_str, tags[0], prompt)
    rest = solution_str.strip()
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        if solution_str.count(start) != 1 or solution_str.count(end) != 1:
            return 0.0
        inside, found, after = rest.removeprefix(start).partition(end)
        if not rest.startswith(start) or not found or not inside.strip():
            return 0.0
        rest = after.lstrip()
    return float(not rest)


def pattern_format(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    pattern: str,
) -> float:
    """1.0 if the whole response, without white space around it, matches the regular expression.

    A dot matches line ends too.
    """
    return float(re.fullmatch(pattern, solution_str.strip(), re.DOTALL) is not None)


def with_opened_tag(response: str, tag: str, prompt: str) -> str:
    """The response, with the opening tag before it if the prompt ends with that."""
    start = f"<{tag}>"
    return start + response if prompt.rstrip().endswith(start) else response
