"""Reward for an exact match."""

from typing import Any


def exact(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    strip: bool = True,
    casefold: bool = False,
) -> float:
    """1.0 if the response equals the ground truth, or one of a list of them, else 0.0.

    `strip` ignores white space around both, `casefold` ignores case.
    """
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if casefold else text

    return float(normal(solution_str) in [normal(str(truth)) for truth in truths])
