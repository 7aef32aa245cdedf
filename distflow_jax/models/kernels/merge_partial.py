"""Merging of partial attention over disjoint sets of keys by their log-sum-exps.

A partial attention is (out [..., H], lse [...]): the normalised softmax-weighted values over its
own keys, and the log-sum-exp of its scores. Without keys it is (0, -inf).
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

PartialAttention = tuple[jax.Array, jax.Array]


def merge(parts: Sequence[PartialAttention]) -> PartialAttention:
    """Attention over the union of the keys of all `parts`, float32.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i); (0, -inf) without any key.
    Dao et al. 2022 (arxiv.org/abs/2205.14135), section 3.1; for separately computed partial
    attention: arxiv.org/abs/2311.01282.
    """
    if not parts:
        raise ValueError("merge needs at least one pair (out, lse), got none")
    shapes = [(out.shape, lse.shape) for out, lse in parts]
    for out_shape, lse_shape in shapes:
        if (out_shape, lse_shape) != shapes[0] or out_shape[:-1] != lse_shape:
            raise ValueError(
                "merge needs equal shapes, out [..., H] and lse [...], got "
                + ", ".join(f"out {list(o)} lse {list(s)}" for o, s in shapes)
            )
    top = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    # without any key top is -inf, and -inf - -inf would be nan
    base = jnp.where(top == -jnp.inf, 0.0, top).astype(jnp.float32)
    # Python sums: XLA:CPU takes 20 times as long for a reduction over a stacked dim
    weights = [jnp.exp(lse - base) for _, lse in parts]
    total = sum(weights)
    merged = sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True))
    merged = merged / jnp.where(total == 0.0, 1.0, total)[..., None]
    return merged, base + jnp.log(total)


def merge_stacked(out: jax.Array, lse: jax.Array) -> PartialAttention:
    """`merge` along the first dim of out float32 [P, ..., H] and lse float32 [P, ...]."""
    top = lse.max(axis=0)
    # without any key top is -inf, and -inf - -inf would be nan
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(lse - base[None])
    total = weight.sum(axis=0)
    merged = (weight[..., None] * out).sum(axis=0)
    merged = merged / jnp.where(total == 0.0, 1.0, total)[..., None]
    return merged, base + jnp.log(total)
