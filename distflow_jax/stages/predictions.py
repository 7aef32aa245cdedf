"""Predictions of a model for the rows of a step: log-probs of a policy, numbers of a critic or
reward model."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from distflow_jax.dag.plan_walker import Stage
from distflow_jax.models.decoder_config import scalar_model
from distflow_jax.stages.stage_context import ModelContext, routed_rows
from distflow_jax.training.batch_forward import make_logp, make_scores, make_values
from distflow_jax.training.state import TrainState


def build_old_logp(context: ModelContext) -> Stage:
    """rows, routed_experts where planned -> old_logp [K, R, L] of the actor as it
    stands."""
    return _logp(context, "old_logp")


def build_ref_logp(context: ModelContext) -> Stage:
    """rows -> ref_logp [K, R, L] of the frozen reference, which routes by itself."""
    return _logp(context, "ref_logp")


def build_values(context: ModelContext) -> Stage:
    """rows -> value [K, R, L]: what the critic expects before each response token."""
    return _scalars(context, make_values, "value")


def build_scores(context: ModelContext) -> Stage:
    """rows -> score [K, R, S] of a reward model."""
    return _scalars(context, make_scores, "score")


def _logp(context: ModelContext, field: str) -> Stage:
    logp = make_logp(shape=context.shape, model=context.model, forward=context.forward)
    temperature = jnp.float32(context.temperature)
    return _stage(field, lambda params, fields: logp(params, routed_rows(fields), temperature))


def _scalars(context: ModelContext, make: Callable[..., Callable], field: str) -> Stage:
    predict = make(shape=context.shape, model=scalar_model(context.model), forward=context.forward)
    return _stage(field, lambda params, fields: predict(params, fields["rows"]))


def _stage(field: str, predict: Callable[[Any, dict[str, Any]], Any]) -> Stage:
    def stage(state, fields, options):
        params = state.params if isinstance(state, TrainState) else state
        return state, {field: predict(params, fields)}, {}

    return stage
