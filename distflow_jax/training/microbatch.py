"""Walking over the micro-batches of a step inside one compiled program.

Rows lie rank-major: [R, ...] = [ranks, steps, micro, ...]; a micro-batch takes `micro` rows of each
rank, so that nothing moves between ranks. How many are worked off is a traced number, the same on
every device: empty rows cost nothing and nothing recompiles.
"""

from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.parallel.rules import constrain


def split(tree: Any, ranks: int, micro: int) -> Any:
    """[R, ...] -> [ranks, steps, micro, ...] on every leaf; R must be divisible by ranks *
    micro."""

    def one(x):
        return x.reshape(ranks, x.shape[0] // (ranks * micro), micro, *x.shape[1:])

    return jax.tree.map(one, tree)


def num_filled(segment: jax.Array) -> jax.Array:
    """How many micro-batches hold any token; `segment` is split, [ranks, steps, micro, L]."""
    filled = jnp.any(segment > 0, axis=(0, 2, 3))
    steps = jnp.arange(1, filled.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(filled, steps, 0))


def take(tree: Any, index: jax.Array) -> Any:
    """Micro-batch `index` of a split tree: leaves [ranks * micro, ...], rows divided over ranks."""

    def one(x):
        part = jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)
        part = part.reshape(x.shape[0] * x.shape[2], *x.shape[3:])
        return constrain(part, "rows", *["length"] * (part.ndim - 1))

    return jax.tree.map(one, tree)


def put(out: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    """Writes a micro-batch's result [ranks * micro, ...] back into the split array `out`."""
    part = part.reshape(out.shape[0], 1, out.shape[2], *out.shape[3:])
    return jax.lax.dynamic_update_slice_in_dim(out, part, index, axis=1)


def join(out: jax.Array) -> jax.Array:
    """Inverse of split for one array."""
    return out.reshape(-1, *out.shape[3:])
