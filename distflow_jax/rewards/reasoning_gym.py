"""Reward of the optional package reasoning_gym, for its own data sets."""

import functools
import importlib
import re
from types import ModuleType
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> float:
    """The score of the data set's own `score_answer`, from 0.0 to 1.0.

    The answer is the content of the last `<answer>..</answer>`, or else the whole response. Needs
    data of `reasoning_gym:NAME`, whose `extra_info["entry"]` names the data set.

    Raises:
      ValueError: other data, or the package is not installed.
    """
    entry = (extra_info or {}).get("entry")
    if entry is None:
        raise ValueError(
            f"the reward reasoning_gym scores data of reasoning_gym:NAME, not of {data_source!r}; "
            "choose another reward.function or data.train"
        )
    tagged = ANSWER.findall(solution_str)
    answer = (tagged[-1] if tagged else solution_str).strip()
    score_answer = load().get_score_answer_fn(entry["metadata"]["source_dataset"])
    return float(score_answer(answer, entry))


@functools.cache
def load() -> ModuleType:
    """Imports the package at first use: that takes several seconds."""
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ValueError(
            "the reward reasoning_gym needs an optional package: pip install reasoning_gym"
        ) from error
