"""Sampling with or without environments: the one entry point of rollout, evaluation, generation."""

from collections.abc import Callable, Sequence

from distflow_jax.batch import Prompt
from distflow_jax.environments.episode_sampler import EpisodeSampler, RequestKey
from distflow_jax.environments.episodes import Episode, single_turn
from distflow_jax.environments.registry import Environments
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, Response, RolloutStats, SamplingParams
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
        sampler = EpisodeSampler(engine, state, environments, on_response)
        return _in_turns(sampler, [GroupRequest(prompt, sampling) for prompt in prompts])
    state, responses, stats = sample(engine, state, prompts, sampling, on_response=on_response)
    return state, [single_turn(response) for response in responses], stats


def _in_turns(
    sampler: EpisodeSampler, requests: Sequence[GroupRequest]
) -> tuple[SamplerState, list[Episode], RolloutStats]:
    """Answers requests in turns, the longest expected first; closes the sampler."""
    found: dict[RequestKey, list[Episode]] = {}
    for i in sorted(range(len(requests)), key=lambda i: (-requests[i].prompt.expected_length, i)):
        sampler.submit(i, requests[i])
    try:
        while sampler.busy:
            found |= dict(sampler.round())
    finally:
        state = sampler.close()
    episodes = [episode for key in sorted(found) for episode in found[key]]
    return state, episodes, sampler.stats or RolloutStats()
