"""Reward 0 for every response, for runs whose environment gives all rewards."""

from typing import Any


def zero(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> float:
    """0.0 for every response; the score is then the sum of rollout.environment's rewards."""
    return 0.0
