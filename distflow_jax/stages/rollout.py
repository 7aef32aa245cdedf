"""Rollout: responses to the step's prompts, from this process's sampler."""

from distflow_jax.rollout.sampler import columns, respond
from distflow_jax.stages.context import Stage, StageContext, own_part


def build_rollout(context: StageContext) -> Stage:
    """prompt (one entry per response wanted) -> response, response_mask, rollout_logp, version,
    finished."""
    config, engine = context.rollout, context.engine

    def rollout(state, fields, options):
        prompts = fields["prompt"]
        unique = list({p.counter: p for p in prompts}.values())
        own = {p.counter for p in unique[own_part(len(unique), context.member, context.hosts)]}
        state, responses, stats = respond(
            engine,
            state,
            unique,
            num_samples=len(prompts) // len(unique),
            limit=config.max_response_length,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            on_response=lambda r: context.on_response(r) if r.prompt.counter in own else None,
        )
        metrics = {"perf/generate_calls": stats.generate_calls}
        return state, columns(responses, state.version), metrics

    return rollout
