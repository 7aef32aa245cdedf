"""One number per token from a critic, or per response from a reward model."""

from typing import Any

from distflow_jax.models.config import scalar_model
from distflow_jax.stages.context import Stage, StageContext
from distflow_jax.training.predict import make_scores, make_values
from distflow_jax.training.state import TrainState


def build_values(context: StageContext) -> Stage:
    """response (Rows) -> value [K, R, L]: what the critic expects before each response token."""
    values = make_values(
        shape=context.shape, model=scalar_model(context.model), forward=context.forward
    )

    def stage(state, fields, options):
        return state, {"value": values(_params(state), fields["response"])}, {}

    return stage


def build_scores(context: StageContext) -> Stage:
    """response (Rows) -> score [K, R, S] of a reward model."""
    scores = make_scores(
        shape=context.shape, model=scalar_model(context.model), forward=context.forward
    )

    def stage(state, fields, options):
        return state, {"score": scores(_params(state), fields["response"])}, {}

    return stage


def _params(state: Any) -> Any:
    return state.params if isinstance(state, TrainState) else state
