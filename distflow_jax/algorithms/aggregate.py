"""Aggregation of per-token losses into one number: a weighted sum over a denominator.

The numerator is summed over micro-batches, devices and processes. The denominator is a global count
of the optimizer step, so the result depends neither on the mesh nor on the micro-batch size.

R rows, L tokens per row.
"""

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.packed import index_in_sequence, order_of_sequences, per_token
from distflow_jax.batch import Rows


def token_weights(mode: str, mask_RL: jax.Array, sequence_length_RL: jax.Array) -> jax.Array:
    """Weight of each token in the numerator, float32 [R, L].

    `sequence_length_RL`: number of masked-in tokens of the sequence that each token belongs to. For
    fixed-budget, `mask_RL` is the result of within_budget.
    """
    weight = mask_RL.astype(jnp.float32)
    if mode == "seq-mean-token-mean":
        weight = weight / jnp.maximum(sequence_length_RL.astype(jnp.float32), 1.0)
    return weight


def within_budget(rows: Rows, budget: int, spent: jax.Array | None = None) -> jax.Array:
    """Mask of the first `budget` response tokens of an optimizer step, bool [R, L].

    `rows` holds all rows of the step, or of a partial batch that comes after `spent` tokens of the
    step, an int32 scalar; None: all rows. Responses are taken in the order of (group, sample),
    which does not depend on packing; the last one is cut. Every step then has the same weight,
    whatever its lengths. C3PO, of Ring-lite (Ling team 2025, arxiv.org/abs/2506.14731).
    """
    order = order_of_sequences(rows)
    length = jnp.where(rows.valid, rows.length, 0)
    ranked = jnp.zeros(length.size, jnp.int32).at[order.reshape(-1)].set(length.reshape(-1))
    before = (jnp.cumsum(ranked) - ranked)[order]
    place = per_token(before, rows.segment) + index_in_sequence(rows)
    if spent is not None:
        place = place + spent
    return rows.response_mask & (place < budget)


def denominator(
    mode: str, num_tokens: jax.Array, num_sequences: jax.Array, *, norm: float, budget: int
) -> jax.Array:
    """Denominator of the loss, a float32 scalar, from the scalar counts of an optimizer step.

    `norm` is used by seq-mean-token-sum-norm only, `budget` (tokens) by fixed-budget only.
    token-mean: Yu et al. 2025 (DAPO, arxiv.org/abs/2503.14476), eq. 8. seq-mean-token-mean: Shao et
    al. 2024 (GRPO, arxiv.org/abs/2402.03300), eq. 3. seq-mean-token-sum-norm: Liu et al. 2025
    (Dr. GRPO, arxiv.org/abs/2503.20783), with `norm` the longest response.
    """
    tokens = num_tokens.astype(jnp.float32)
    sequences = num_sequences.astype(jnp.float32)
    return {
        "token-mean": tokens,
        "token-sum": jnp.ones_like(tokens),
        "seq-mean-token-sum": sequences,
        "seq-mean-token-mean": sequences,
        "seq-mean-token-sum-norm": sequences * norm,
        "fixed-budget": jnp.full_like(tokens, budget),
    }[mode]
