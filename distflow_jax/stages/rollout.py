"""Rollout: responses to the step's prompts, from this process's sampler."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from distflow_jax.dag.graph import Node
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.data.step_columns import entries_of_host, group_numbers, group_starts
from distflow_jax.environments.episodes import (
    Episode,
    episode_metrics,
    episode_sums,
    turn_columns,
    without_lone,
)
from distflow_jax.environments.sample_episodes import sample_episodes
from distflow_jax.layout import ROUTED_EXPERTS, Parts
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.stages.stage_context import SamplingContext


def build_rollout(context: SamplingContext) -> Stage:
    """uid and prompt (one entry per response wanted) -> response, and of response_mask,
    rollout_logp, version, finished, environment_reward, routed_experts, response_images what the
    node writes.

    With the option `greedy` each prompt is answered once, by its likeliest tokens, and all its
    entries get that answer: ReMax's baseline. With an environment responses are in turns.
    """
    engine, node, environments = context.engine, context.node, context.environments
    greedy, sampling = is_greedy(node), node_sampling(context)

    def rollout(state, fields, options):
        uid = fields["uid"]
        prompts = [fields["prompt"][i] for i in group_starts(uid)]
        own = set(uid[entries_of_host(uid, context.member, context.hosts), 0].tolist())

        def on_response(response):
            if response.prompt.counter in own:
                context.on_response(response)

        wanted = 1 if greedy else len(uid) // len(prompts)
        state, episodes, stats = sample_episodes(
            engine,
            state,
            prompts,
            dataclasses.replace(sampling, num_samples=wanted),
            environments,
            on_response=None if greedy else on_response,
        )
        groups = (episodes[i : i + wanted] for i in range(0, len(episodes), wanted))
        episodes = [episode for group in groups for episode in without_lone(group)]
        if greedy:  # one answer for all entries of a prompt
            episodes = [episodes[group] for group in group_numbers(uid)]
        metrics = {"perf/generate_calls": stats.generate_calls}
        if engine.config.prefix_tokens:
            metrics["rollout/prefix/hits"] = stats.prefix_hits
            metrics["rollout/prefix/tokens"] = stats.prefix_tokens
        if engine.config.images is not None:
            metrics["rollout/images_encoded"] = stats.images
        if engine.config.speculative_tokens:
            share = stats.accepted / max(stats.proposed, 1)
            metrics["rollout/speculation/accepted_share"] = share
        metrics |= stats.occupancy.metrics()
        metrics = {f"{context.prefix}{name}": value for name, value in metrics.items()}
        if environments is not None:
            metrics[node.id] = environment_parts(episodes, context.prefix)
        return state, written_columns(node, episodes), metrics

    return rollout


def is_greedy(node: Node) -> bool:
    """Whether a sampling node answers each prompt once, by its likeliest tokens."""
    return bool(node.options.get("greedy", False))


def node_sampling(context: SamplingContext) -> SamplingParams:
    """How a node samples. ValueError for a field that its sampler does not record."""
    node = context.node
    record = ROUTED_EXPERTS in node.writes
    if record and context.engine and not context.engine.config.record_experts:
        raise ValueError(
            f"node {node.id!r}: writes {ROUTED_EXPERTS!r}, which a sampler records with "
            "training.router_replay alone: set that, or take it out of the node's writes"
        )
    sampling = dataclasses.replace(SamplingParams.of_training(context.rollout), record=record)
    if is_greedy(node):
        sampling = dataclasses.replace(sampling, num_samples=1, temperature=0.0, top_k=0, top_p=1.0)
    return sampling


def written_columns(node: Node, episodes: Sequence[Episode]) -> dict[str, Any]:
    """The columns that a sampling node writes, by their names inside the stage."""
    columns = turn_columns(episodes)
    return {name: columns[name] for name in node.writes}


def environment_parts(episodes: Sequence[Episode], prefix: str = "") -> Parts:
    """environment/* of some episodes, to be merged with those of others."""

    def merged(parts: Sequence[Any]) -> dict[str, float]:
        metrics = episode_metrics([part[0] for part in parts], max(part[1] for part in parts))
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    turns = max((e.turns for e in episodes), default=0)
    return Parts(((episode_sums(episodes), turns),), merged)
