"""No reward of its own: where an environment gives all there is."""

from typing import Any


def zero(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> float:
    """0.0 for every response; the score is then what rollout.environment gave."""
    return 0.0
