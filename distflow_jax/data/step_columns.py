"""The columns that begin a step: prompts to answer, or prompts with their answers.

One entry per response, those to one prompt next to each other. N responses, G prompts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from distflow_jax.batch import Prompt


class Answers(NamedTuple):
    """Answers to a prompt of the data set."""

    of_row: int  # read from its row: `chosen`, `rejected`
    of_step: int | None  # that a step has; None: as many as are sampled


# by graph.data. To a prompt of unpaired rows a step also has the answer of another row
ANSWERS = {
    "prompts": Answers(0, None),
    "demonstrations": Answers(1, 1),
    "preferences": Answers(2, 2),
    "unpaired": Answers(1, 2),
}


def loader_columns(prompts: Sequence[Prompt], num_samples: int) -> dict[str, Sequence[Any]]:
    """The columns of a step: uid, prompt and, where prompts bring answers, response, response_mask
    and finished, and label where these are labelled.

    `num_samples` responses will be sampled for a prompt without answers. Of a preference pair the
    better answer comes first, of an unpaired row its own.
    """
    if not prompts or not prompts[0].answers:
        return {
            "uid": uid_column(prompts, num_samples),
            "prompt": [p for p in prompts for _ in range(num_samples)],
        }
    answers = [answer for p in prompts for answer in p.answers]
    masks = [mask for p in prompts for mask in p.answer_masks]
    labels = [p.label for p in prompts for _ in p.answers]
    return {
        "uid": uid_column(prompts, len(prompts[0].answers)),
        "prompt": [p for p in prompts for _ in p.answers],
        "response": answers,
        "response_mask": masks or [np.ones(len(answer), bool) for answer in answers],
        "finished": np.ones(len(answers), bool),
    } | ({} if None in labels else {"label": np.array(labels, bool)})


def uid_column(prompts: Sequence[Prompt], num_samples: int) -> np.ndarray:
    """(counter of the prompt, number of the sample) of each response, int64 [N, 2]."""
    counters = np.array([prompt.counter for prompt in prompts], np.int64)
    samples = np.tile(np.arange(num_samples), len(prompts))
    return np.stack([np.repeat(counters, num_samples), samples], axis=1)


def group_starts(uid: np.ndarray) -> np.ndarray:
    """Index of each prompt's first response in a uid column [N, 2], int64 [G]."""
    return np.flatnonzero(np.diff(uid[:, 0], prepend=-1))


def group_numbers(uid: np.ndarray) -> np.ndarray:
    """Number of each response's prompt among those of a uid column [N, 2], int64 [N]."""
    return np.cumsum(np.diff(uid[:, 0], prepend=-1) != 0) - 1


def entries_of_host(uid: np.ndarray, host: int, hosts: int) -> slice:
    """The responses, of uid [N, 2], of one of the `hosts` that share a sampler.

    Prompts are divided in their order: a group belongs to one host.
    """
    starts = np.append(group_starts(uid), len(uid))
    groups = len(starts) - 1
    return slice(int(starts[groups * host // hosts]), int(starts[groups * (host + 1) // hosts]))
