"""Predictions of a model for the rows of a step, in micro-batches: log-probs of a policy, numbers
of a critic or reward model.

K mini-batches, R rows, L tokens per row, S sequences per row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.batch import Rows
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel, scalar_model
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.programs.bounded_loops import bounded_loop
from distflow_jax.stages.stage_context import ModelContext, routed_rows
from distflow_jax.training import microbatch
from distflow_jax.training.forward import (
    ForwardConfig,
    response_logp,
    response_values,
    sequence_scores,
)
from distflow_jax.training.state import TrainState
from distflow_jax.training.update import UpdateShape


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


def _every_micro_batch(
    one: Callable[..., jax.Array], like: Callable[[Rows], jax.Array], shape: UpdateShape
):
    """Compiled (params, rows, *extra) -> float32 [K, R, ...], shaped as the field like(rows).

    Applies `one` to each micro-batch that is not empty; the rest of the result is 0.
    """

    def one_mini_batch(params, rows, extra):
        micro_batches = microbatch.split(rows, shape.ranks, shape.micro_rows)

        def body(index, out):
            micro_batch = microbatch.take(micro_batches, index)
            return microbatch.write(out, one(params, micro_batch, *extra), index)

        out = jnp.zeros(like(micro_batches).shape, jnp.float32)
        trips = microbatch.num_filled(micro_batches.segment)
        most = micro_batches.segment.shape[1]
        out = bounded_loop(trips, body, out, most=most)
        return microbatch.join(out)

    @jax.jit
    def predict(params, rows, *extra):
        with use_mesh(shape.mesh):
            return jax.lax.map(lambda r: one_mini_batch(params, r, extra), rows)

    return predict


def make_logp(*, shape: UpdateShape, model: DecoderConfig, forward: ForwardConfig):
    """Compiled (params, rows, temperature) -> logp float32 [K, R, L], 0 outside response_mask."""

    def logp(params: Any, rows: Rows, temperature: jax.Array) -> jax.Array:
        return response_logp(params, model, rows, temperature, forward)[0]

    return _every_micro_batch(logp, lambda rows: rows.tokens, shape)


def make_values(*, shape: UpdateShape, model: ScalarModel, forward: ForwardConfig):
    """Compiled (params, rows) -> a critic's values float32 [K, R, L], 0 outside response_mask."""

    def values(params: Any, rows: Rows) -> jax.Array:
        return response_values(params, model, rows, forward)

    return _every_micro_batch(values, lambda rows: rows.tokens, shape)


def make_scores(*, shape: UpdateShape, model: ScalarModel, forward: ForwardConfig):
    """Compiled (params, rows) -> a reward model's scores float32 [K, R, S], 0 for empty slots."""

    def scores(params: Any, rows: Rows) -> jax.Array:
        return sequence_scores(params, model, rows, forward)

    return _every_micro_batch(scores, lambda rows: rows.group, shape)
