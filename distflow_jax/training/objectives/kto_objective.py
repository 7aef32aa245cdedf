"""KTO's objective over single responses, each labelled desirable or not.

A group has two members with one prompt: member 0 is the row's own response, member 1 the response
of another row, which only the KL baseline reads. R rows, L tokens per row, S sequences per row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.masked import masked_sum
from distflow_jax.algorithms.packed import per_sequence
from distflow_jax.algorithms.preference import kto
from distflow_jax.batch import Rows
from distflow_jax.config.algorithm_config import PreferenceConfig
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.training.forward import ForwardConfig, response_logp
from distflow_jax.training.objective import Metrics, Objective, Preview, at_least_one


class KtoBatch(NamedTuple):
    """Fields of KTO's loss; those of rows are [R, L] and [R, S]."""

    rows: Rows
    ref_logp: jax.Array  # [R, L], of the reference model
    label: jax.Array  # [R, S], 1 for desirable responses, else 0
    # [R, L], of the policy as it is before the optimizer step; no gradient
    current_logp: jax.Array | None = None
    baseline: jax.Array | None = None  # [R, S], z0 of the optimizer step, set by `prepare`


def kto_objective(
    model: DecoderConfig, config: PreferenceConfig, forward: ForwardConfig
) -> Objective:
    """The mean of KTO's loss over the rows' own responses of a step."""

    def predict(params, batch, temperature):
        return response_logp(params, model, batch.rows, temperature, forward)[0]

    return Objective(
        "actor",
        model,
        prepare,
        at_least_one,
        functools.partial(evaluate, model=model, config=config, forward=forward),
        preview=Preview(
            predict, lambda batch, logp: batch._replace(current_logp=logp), lambda batch: None
        ),
        waits="options.objective=kto compares responses with the mean KL of an optimizer step",
    )


def prepare(batch: KtoBatch, before: Any = None) -> tuple[KtoBatch, jax.Array]:
    """The batch with z0, and the number of the rows' own responses, int32.

    z0 estimates the KL of policy and reference: the mean of log(policy / reference) over responses
    of other rows to the prompts, at least 0.
    """
    rows = batch.rows
    assert batch.current_logp is not None, "set by the objective's preview"
    others = rows.valid & (rows.member == 1)
    gap = per_sequence(batch.current_logp, rows) - per_sequence(batch.ref_logp, rows)
    mean = masked_sum(gap, others) / at_least_one(others.sum(dtype=jnp.int32))
    baseline = jax.lax.stop_gradient(jnp.maximum(mean, 0.0))
    batch = batch._replace(baseline=jnp.broadcast_to(baseline, rows.valid.shape))
    return batch, _own(rows).sum(dtype=jnp.int32)


def evaluate(
    params: Any,
    batch: KtoBatch,
    count: jax.Array,
    temperature: jax.Array,
    *,
    model: DecoderConfig,
    config: PreferenceConfig,
    forward: ForwardConfig,
) -> tuple[jax.Array, Metrics]:
    """Contribution of a micro-batch to the loss, a scalar, and to the metrics, with TRL's names.

    Numbers of desirable (`chosen`) and other (`rejected`) responses are their parts of the mean
    over all; coordinator/batch_metrics.py divides these by the shares of both.
    """
    rows, own = batch.rows, _own(batch.rows)
    assert batch.baseline is not None, "set by `prepare`"
    token_logp, _ = response_logp(params, model, rows, temperature, forward)
    logp = per_sequence(token_logp, rows)
    reward = logp - per_sequence(batch.ref_logp, rows)
    desirable = batch.label > 0
    weight = jnp.where(desirable, config.desirable_weight, config.undesirable_weight)
    loss = kto(reward, batch.baseline, weight, desirable, beta=config.beta)

    def mean(x, mask=own):
        return masked_sum(x, mask) / count

    loss = mean(loss)
    sums = {"kto/kl": mean(batch.baseline)}
    for name, mask in (("chosen", own & desirable), ("rejected", own & ~desirable)):
        sums |= {
            f"rewards/{name}": config.beta * mean(reward, mask),
            f"logps/{name}": mean(logp, mask),
            f"kto/{name}_share": mean(jnp.ones_like(logp), mask),
        }
    return loss, jax.lax.stop_gradient({"sum": sums, "max": {}})


def _own(rows: Rows) -> jax.Array:
    """Mask of the rows' own responses, bool [R, S]."""
    return rows.valid & (rows.member == 0)
