"""Rollout: responses to the step's prompts, from this process's sampler."""

from collections.abc import Sequence

from distflow_jax.data.step_columns import entries_of_host, group_numbers, group_starts
from distflow_jax.environments.episodes import Episode, episode_metrics, episode_sums, turn_columns
from distflow_jax.environments.multiturn import TurnLimits, respond_in_turns
from distflow_jax.layout import ROUTED_EXPERTS
from distflow_jax.parallel import processes
from distflow_jax.rollout.sampler import columns, respond
from distflow_jax.stages.stage_context import Stage, StageContext


def build_rollout(context: StageContext) -> Stage:
    """uid and prompt (one entry per response wanted) -> response, and of response_mask,
    rollout_logp, version, finished, environment_reward, routed_experts what the node writes.

    With the option `greedy` each prompt is answered once, by its likeliest tokens, and all its
    entries get that answer: ReMax's baseline. With an environment responses are in turns, and the
    stage is collective: metrics are of all processes.
    """
    config, engine, node = context.rollout, context.engine, context.node
    environments = context.environments
    greedy = bool(node.options.get("greedy", False))
    limits = TurnLimits.of(config, config.max_response_length)
    record = ROUTED_EXPERTS in node.writes
    if record and not engine.config.record_experts:
        raise ValueError(
            f"node {node.id!r}: writes {ROUTED_EXPERTS!r}, which a sampler records with "
            "training.router_replay alone: set that, or take it out of the node's writes"
        )

    def rollout(state, fields, options):
        uid, starts = fields["uid"], group_starts(fields["uid"])
        prompts = [fields["prompt"][i] for i in starts]
        own = set(uid[entries_of_host(uid, context.member, context.hosts), 0].tolist())
        if greedy:
            sampling = {"num_samples": 1, "temperature": 0.0, "record": record}
        else:
            sampling = {
                "num_samples": len(uid) // len(prompts),
                "temperature": config.temperature,
                "top_k": config.top_k,
                "top_p": config.top_p,
                "record": record,
                "on_response": lambda r: (
                    context.on_response(r) if r.prompt.counter in own else None
                ),
            }

        def of_each(answers):
            """One answer per response."""
            return [answers[g] for g in group_numbers(uid)] if greedy else answers

        if environments is None:
            state, responses, stats = respond(
                engine, state, prompts, limit=limits.response, **sampling
            )
            written, metrics = columns(of_each(responses), state.version), {}
        else:
            state, episodes, stats = respond_in_turns(
                engine, state, prompts, environments, limits, **sampling
            )
            written, metrics = turn_columns(of_each(episodes), state.version), _metrics(episodes)
        metrics["perf/generate_calls"] = stats.generate_calls
        if engine.config.prefix_tokens:
            metrics["rollout/prefix/hits"] = stats.prefix_hits
            metrics["rollout/prefix/tokens"] = stats.prefix_tokens
        if engine.config.speculative_tokens:
            share = stats.accepted / max(stats.proposed, 1)
            metrics["rollout/speculation/accepted_share"] = share
        return (
            state,
            {name: written[name] for name in node.writes},
            {f"{context.prefix}{name}": value for name, value in metrics.items()},
        )

    return rollout


def _metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """environment/* over all processes; collective."""
    turns = max((e.turns for e in episodes), default=0)
    # as text: environments may log other numbers in other processes
    parts = processes.all_gather_json([episode_sums(episodes), turns])
    return episode_metrics([part[0] for part in parts], max(part[1] for part in parts))
