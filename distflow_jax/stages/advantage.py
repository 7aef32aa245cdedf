"""Advantage: scores of whole groups, wherever their rows lie, to one number per token.

K mini-batches, R rows, L tokens per row, S sequences per row.
"""

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.advantages import ADVANTAGES
from distflow_jax.algorithms.masked import masked_max, masked_sum, safe_divide
from distflow_jax.stages.context import Stage, StageContext
from distflow_jax.training.forward import per_token


def build_advantage(context: StageContext) -> Stage:
    """score [K, R, S], response_mask (Rows) -> advantage [K, R, L], 0 outside responses."""
    estimate = ADVANTAGES[context.algorithm.advantage]
    num_groups = context.prompts_per_step

    @jax.jit
    def compute(score, rows):
        per_sequence = estimate(score, rows.group, rows.valid, num_groups=num_groups)
        spread = jax.vmap(per_token)(per_sequence, rows.segment)
        mask = rows.response_mask
        advantage = jnp.where(mask, spread, 0.0)
        metrics = {
            "critic/advantages/mean": safe_divide(
                masked_sum(advantage, mask), mask.sum().astype(jnp.float32)
            ),
            "critic/advantages/max": masked_max(advantage, mask),
            "critic/advantages/min": -masked_max(-advantage, mask),
        }
        returns = {name.replace("advantages", "returns"): x for name, x in metrics.items()}
        return advantage, metrics | returns

    def advantage(state, fields, options):
        value, metrics = compute(fields["score"], fields["response_mask"])
        return state, {"advantage": value}, metrics

    return advantage
