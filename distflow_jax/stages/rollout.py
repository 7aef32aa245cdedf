"""Rollout: responses to the step's prompts, from this process's sampler."""

from distflow_jax.rollout.sampler import columns, respond
from distflow_jax.stages.context import Stage, StageContext, own_part


def build_rollout(context: StageContext) -> Stage:
    """prompt (one entry per response wanted) -> response, and of response_mask, rollout_logp,
    version, finished what the node writes.

    With the option `greedy` each prompt is answered once, by its likeliest tokens, and all its
    entries get that answer: ReMax's baseline.
    """
    config, engine, node = context.rollout, context.engine, context.node
    greedy = bool(node.options.get("greedy", False))

    def rollout(state, fields, options):
        prompts = fields["prompt"]
        unique = list({p.counter: p for p in prompts}.values())
        own = {p.counter for p in unique[own_part(len(unique), context.member, context.hosts)]}
        if greedy:
            sampling = {"num_samples": 1, "temperature": 0.0}
        else:
            sampling = {
                "num_samples": len(prompts) // len(unique),
                "temperature": config.temperature,
                "top_k": config.top_k,
                "top_p": config.top_p,
                "on_response": lambda r: (
                    context.on_response(r) if r.prompt.counter in own else None
                ),
            }
        state, responses, stats = respond(
            engine, state, unique, limit=config.max_response_length, **sampling
        )
        if greedy:
            answer = dict(zip((p.counter for p in unique), responses, strict=True))
            responses = [answer[p.counter] for p in prompts]
        metrics = {f"{context.prefix}perf/generate_calls": stats.generate_calls}
        if engine.config.speculative_tokens:
            share = stats.accepted / max(stats.proposed, 1)
            metrics[f"{context.prefix}rollout/speculation/accepted_share"] = share
        written = columns(responses, state.version)
        return state, {name: written[name] for name in node.writes}, metrics

    return rollout
