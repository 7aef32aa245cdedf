"""What the loader gives a step, as columns: prompts to answer, or prompts with their answers.

One entry per response, those to one prompt next to each other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt

# graph.data -> answers of a row; None: as many as are sampled
ANSWERS = {"prompts": None, "demonstrations": 1, "preferences": 2}


def given_columns(prompts: Sequence[Prompt], num_samples: int) -> dict[str, Sequence[Any]]:
    """The columns of a step: "prompt" and, where prompts bring answers, "response" and its like.

    `num_samples` responses will be sampled for a prompt without answers. Of a preference pair the
    better answer comes first.
    """
    if not prompts or not prompts[0].answers:
        return {"prompt": [p for p in prompts for _ in range(num_samples)]}
    answers = [answer for p in prompts for answer in p.answers]
    return {
        "prompt": [p for p in prompts for _ in p.answers],
        "response": answers,
        "response_mask": [np.ones(len(answer), bool) for answer in answers],
        "finished": np.ones(len(answers), bool),
    }
