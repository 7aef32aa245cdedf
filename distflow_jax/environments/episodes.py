"""Responses in turns as records: the batch's columns, and the numbers that a step reports."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.environments.failures import CAUSES
from distflow_jax.images.turn_images import to_bytes
from distflow_jax.layout import RESPONSE_IMAGES
from distflow_jax.rollout.requests import Response

# Why a response ended: the environment said so; a limit; its environment failed, so that it has no
# score.
REASONS = ("done", "max_turns", "turn_length", "response_length", "failed")

# How names of `episode_metrics` begin that no environment logs.
OF_RUN = ("ended/", "infra/", "observation_tokens", "turns/")

# Counts of failures, in `Episode.logged`: of calls by cause, and of responses drawn anew.
INFRA = tuple(f"infra/{name}" for name in (*CAUSES, "redrawn"))


@dataclasses.dataclass
class Episode:
    """One response with all of its turns.

    `response.finished` is whether the environment ended it. Log-probs are 0 where `mask` is False,
    on observations.
    """

    response: Response
    mask: np.ndarray  # bool [T]: what was sampled
    reward: float  # of all turns; nan: the response leaves its group
    turns: int  # of the model
    reason: str  # one of REASONS
    logged: dict[str, float]  # the environment's numbers, summed over the turns, and INFRA

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled."""
        return int(self.mask.sum())


def single_turn(response: Response) -> Episode:
    """The episode of a response without an environment."""
    mask = np.ones(len(response.tokens), bool)
    reason = "done" if response.finished else "response_length"
    return Episode(response, mask, reward=0.0, turns=1, reason=reason, logged={})


def without_lone(episodes: Sequence[Episode]) -> list[Episode]:
    """All responses to a prompt. One that would be left alone, since no other one has a score,
    leaves the group, too: it has nothing to be compared with."""
    alone = sum(not math.isnan(e.reward) for e in episodes) == 1 < len(episodes)
    return [dataclasses.replace(e, reward=math.nan) if alone else e for e in episodes]


def turn_columns(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Episodes as the batch's columns."""
    return {
        "response": [e.response.tokens for e in episodes],
        "response_mask": [e.mask for e in episodes],
        "rollout_logp": [e.response.logp for e in episodes],
        "version": [e.response.version for e in episodes],
        "finished": np.array([e.response.finished for e in episodes], bool),
        "routed_experts": [e.response.routed_experts for e in episodes],
        RESPONSE_IMAGES: [to_bytes(e.response.shown) for e in episodes],
        "environment_reward": np.array([e.reward for e in episodes], np.float32),
    }


def episode_sums(episodes: Sequence[Episode]) -> dict[str, float]:
    """Numbers about one process's episodes that add up over processes, see episode_metrics."""
    sums = collections.Counter(
        responses=len(episodes),
        turns=sum(e.turns for e in episodes),
        observation_tokens=sum(int((~e.mask).sum()) for e in episodes),
        unscored=sum(math.isnan(e.reward) for e in episodes),
    )
    for episode in episodes:
        sums[f"ended/{episode.reason}"] += 1
        for name, value in episode.logged.items():
            if math.isfinite(value):
                sums[f"logged/{name}"] += value
            else:  # one NaN would be all that is left of the others
                sums[f"odd/{name}"] += 1
    return dict(sums)


def episode_metrics(parts: Sequence[Mapping[str, float]], most_turns: int) -> dict[str, float]:
    """`environment/*` from the sums of all processes, and the turns of the longest episode.

    Means are over responses; `environment/infra/*` are counts.
    """
    sums: collections.Counter[str] = collections.Counter()
    for part in parts:
        sums.update(part)
    count = sums["responses"]
    if not count:
        return {}
    shares = {f"environment/ended/{name}": sums[f"ended/{name}"] / count for name in REASONS[:-1]}
    names = [name.removeprefix("logged/") for name in sums if name.startswith("logged/")]
    logged = {
        f"environment/{name}": sums[f"logged/{name}"] / (count - sums[f"odd/{name}"])
        for name in names
        if name not in INFRA
    }
    failures = {f"environment/{name}": float(sums[f"logged/{name}"]) for name in INFRA}
    others = {
        "environment/turns/mean": sums["turns"] / count,
        "environment/turns/max": float(most_turns),
        "environment/observation_tokens": sums["observation_tokens"] / count,
        "environment/infra/unscored": float(sums["unscored"]),
    }
    return logged | shares | failures | others
