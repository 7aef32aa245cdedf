"""One number per token from a critic, or per response from a reward model."""

from collections.abc import Callable
from typing import Any

from distflow_jax.dag.plan_walker import Stage
from distflow_jax.models.decoder_config import scalar_model
from distflow_jax.stages.stage_context import ModelContext
from distflow_jax.training.batch_forward import make_scores, make_values
from distflow_jax.training.state import TrainState


def build_values(context: ModelContext) -> Stage:
    """rows -> value [K, R, L]: what the critic expects before each response token."""
    return _build(context, make_values, "value")


def build_scores(context: ModelContext) -> Stage:
    """rows -> score [K, R, S] of a reward model."""
    return _build(context, make_scores, "score")


def _build(context: ModelContext, make: Callable[..., Callable], field: str) -> Stage:
    predict = make(shape=context.shape, model=scalar_model(context.model), forward=context.forward)

    def stage(state: Any, fields: dict[str, Any], options: dict[str, Any]):
        params = state.params if isinstance(state, TrainState) else state
        return state, {field: predict(params, fields["rows"])}, {}

    return stage
