"""Reward requests made from a prompt and a response, and checks of rows by such requests.

Not in records.py, which the workers import: `Prompt` would import JAX there.
"""

import array
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.rewards.pool import RewardPool
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


def check_references(
    rewards: RewardPool, prompts: Sequence[Prompt], column: str, place: Callable[[int], str]
) -> None:
    """Scores the programs that the rows of some prompts bring with them in a column, by a reward
    that runs programs. `place` names a row in messages.

    Raises ValueError if a row has no cases or bad ones, or if its program fails them.
    """
    results = rewards.score([reference_request(prompt, column) for prompt in prompts])
    found: dict[str, list[int]] = {}
    for prompt, result in zip(prompts, results, strict=True):
        if result.error:
            problem = result.error.removeprefix("exception: ").split("\n")[0]
            found.setdefault(problem, []).append(prompt.row)
        elif prompt.extra_info.get(column) and result.score < 1:
            problem = f"the program in column {column!r} fails the row's own cases"
            found.setdefault(problem, []).append(prompt.row)
    for problem, rows in found.items():
        others = f"; also rows {', '.join(str(row + 1) for row in sorted(rows[1:]))}"
        raise ValueError(
            f"{place(rows[0])}: {problem} ({len(rows)} of {len(prompts)} rows checked"
            f"{others if rows[1:] else ''}): fix or remove these rows"
        )
