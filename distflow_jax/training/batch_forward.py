"""Forward passes over a whole batch in micro-batches: log-probs, values and scores.

K mini-batches, R rows, L tokens per row, S sequences per row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.batch import Rows
from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.programs.bounded_loops import bounded_loop
from distflow_jax.training import microbatch
from distflow_jax.training.forward import (
    ForwardConfig,
    response_logp,
    response_values,
    sequence_scores,
)
from distflow_jax.training.update import UpdateShape


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
