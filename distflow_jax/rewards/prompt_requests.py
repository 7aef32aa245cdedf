"""Reward requests made from a prompt and a response.

Not in records.py, which the workers import: `Prompt` would import JAX there.
"""

import array
import dataclasses

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.rewards.records import RewardRequest


def request_for(
    prompt: Prompt, solution: str, tokens: np.ndarray | list[int], step: int = 0
) -> RewardRequest:
    """The request that scores `solution`, the text of a response of `tokens`, int32 [T].

    `step`: steps before the one that the prompt belongs to; 0 in evaluation.
    """
    return RewardRequest(
        data_source=prompt.data_source,
        solution=solution,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        prompt=prompt.text,
        messages=prompt.messages,
        tokens=array.array("i", np.asarray(tokens, np.int32).tobytes()),
        step=step,
    )


def trial_request(prompt: Prompt) -> RewardRequest:
    """The request that checks a reward function before step 1."""
    return request_for(prompt, str(prompt.ground_truth), [0])


def reference_request(prompt: Prompt, column: str) -> RewardRequest:
    """The request that scores a row's own program, text of a column; without one, no program."""
    reference = prompt.extra_info.get(column)
    request = request_for(prompt, f"```python\n{reference}\n```" if reference else "", [0])
    return dataclasses.replace(request, prompt="")  # it is whole, whatever the prompt begins
