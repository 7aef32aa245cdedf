"""What goes to a reward function's worker and what comes back."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class RewardRequest:
    """One response to score."""

    data_source: str
    solution: str  # the response as text
    ground_truth: Any
    extra_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt: str = ""  # as the model saw it
    response_length: int = 0  # tokens


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """What one response is worth.

    `logged` holds the numbers that the function returned beside its score. `error` is None,
    "timeout", or "exception: ..." with the traceback from the second line on; an error scores what
    `reward.on_error` says.
    """

    score: float
    logged: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str | None = None
