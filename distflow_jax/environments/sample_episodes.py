"""Sampling with or without environments: the one entry point of rollout, evaluation, generation."""

from collections.abc import Callable, Sequence

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.environments.episodes import Episode
from distflow_jax.environments.multiturn import sample_turns
from distflow_jax.environments.registry import Environments
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import Response, RolloutStats, SamplingParams
from distflow_jax.rollout.sampler import SamplerState, sample


def sample_episodes(
    engine: RolloutEngine,
    state: SamplerState,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    environments: Environments | None,
    *,
    on_response: Callable[[Response], None] | None = None,
) -> tuple[SamplerState, list[Episode], RolloutStats]:
    """Samples responses to each prompt as episodes; they are ordered by (prompt, sample).

    `environments` None: every response is one turn. `on_response` is called in this thread as soon
    as a response ends.
    """
    if environments is not None:
        return sample_turns(engine, state, prompts, sampling, environments, on_response=on_response)
    state, responses, stats = sample(engine, state, prompts, sampling, on_response=on_response)
    return state, [single_turn(response) for response in responses], stats


def single_turn(response: Response) -> Episode:
    """The episode of a response without an environment."""
    mask = np.ones(len(response.tokens), bool)
    reason = "done" if response.finished else "response_length"
    return Episode(response, mask, reward=0.0, turns=1, reason=reason, logged={})
