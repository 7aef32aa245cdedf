"""Requests to a reward worker, and its results."""

import array
import dataclasses
from typing import Any

from distflow_jax.config.sandbox_config import SandboxConfig

# names of `reward/NAME` that a run logs itself, which no function may log
OF_RUN = frozenset(
    "environment errors no_answer not_finite not_scored overlong_penalty timeouts".split()
)
MOST_SCORE = 1e18  # either sign; float32 has no squares of larger ones, and no variance then


@dataclasses.dataclass(frozen=True)
class RewardRequest:
    """One response to score."""

    data_source: str
    solution: str  # the response as text
    ground_truth: Any
    extra_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt: str = ""  # the text that the model was given, with its chat template
    messages: list[dict[str, Any]] | None = None  # the prompt of the row, if it is a conversation
    tokens: array.array = dataclasses.field(default_factory=lambda: array.array("i"))  # [T]
    step: int = 0  # batches of prompts before its own: steps, but in a region that filters

    @property
    def response_length(self) -> int:
        """T, tokens of the response, the end token included."""
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class ProgramLimits:
    """Limits of programs that a reward function runs."""

    sandbox: SandboxConfig = SandboxConfig()  # the run's section; its limits are those of a case
    seconds: float = 8.0  # of all cases of a program, added up; later cases fail
    parallel: int = 1  # cases of a program that run at once


@dataclasses.dataclass(frozen=True)
class VoteRequest:
    """Answers to one prompt, of which equal ones are to be found."""

    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """The score of one response; NaN for one that the function did not score.

    `logged` holds the numbers that the function returned beside its score. `answer` is what it says
    the response's answer is, "" for none, and None if it does not say. `votes` is the result of a
    VoteRequest: for each answer the number of the first equal one. `error` is None,
    "timeout", or "exception: ..." with the traceback from the second line on; with an error the
    score is `reward.on_error`.
    """

    score: float
    logged: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str | None = None
    answer: str | None = None
    votes: tuple[int, ...] = ()


def number_of(value: Any) -> float | None:
    """A number of Python, NumPy, JAX or torch as a float; None for anything else."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
