"""Log-probs of responses under a fixed model: the reference, or the policy before its update."""

import jax.numpy as jnp

from distflow_jax.dag.plan_walker import Stage
from distflow_jax.stages.stage_context import ModelContext, routed_rows
from distflow_jax.training.batch_forward import make_logp
from distflow_jax.training.state import TrainState


def build_old_logp(context: ModelContext) -> Stage:
    """rows, routed_experts where planned -> old_logp [K, R, L] of the actor as it
    stands."""
    return _build(context, "old_logp")


def build_ref_logp(context: ModelContext) -> Stage:
    """rows -> ref_logp [K, R, L] of the frozen reference, which routes by itself."""
    return _build(context, "ref_logp")


def _build(context: ModelContext, field: str) -> Stage:
    logp = make_logp(shape=context.shape, model=context.model, forward=context.forward)
    temperature = jnp.float32(context.temperature)

    def stage(state, fields, options):
        params = state.params if isinstance(state, TrainState) else state
        return state, {field: logp(params, routed_rows(fields), temperature)}, {}

    return stage
