"""Reward requests made from a prompt and a response.

Not in records.py, which the workers import: `Prompt` would import JAX there.
"""

from distflow_jax.batch import Prompt
from distflow_jax.rewards.records import RewardRequest


def request_for(prompt: Prompt, solution: str, response_length: int) -> RewardRequest:
    """The request that scores `solution`, the text of a response of `response_length` tokens."""
    return RewardRequest(
        data_source=prompt.data_source,
        solution=solution,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        prompt=prompt.text,
        response_length=response_length,
    )


def trial_request(prompt: Prompt) -> RewardRequest:
    """The request that checks a reward function before step 1."""
    return request_for(prompt, str(prompt.ground_truth), 1)
