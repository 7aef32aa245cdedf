"""What a kernel over tiles of attention costs at most, for XLA's schedule and for plans of runs."""

import jax
from jax.experimental import pallas as pl


def flash_cost(q: jax.Array, k: jax.Array, *, products: int, moved: int) -> pl.CostEstimate:
    """Were every row one sequence: `products` of matrices in each tile on or below the diagonal.

    q [B, n, K, X, H] and k [B, m, K, C, H]; `moved`: bytes read, each once. No packing lists more
    tiles than m (m + 1) / 2 of a whole row, and of these every part of one has as many.
    """
    rows, blocks, kv_heads, queries, head_dim = q.shape
    tiles = rows * blocks * (k.shape[1] + 1) // 2
    scores = tiles * kv_heads * queries * k.shape[3]
    return pl.CostEstimate(
        flops=2 * products * scores * head_dim, transcendentals=scores, bytes_accessed=moved
    )


def nbytes(*arrays: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of all of them."""
    return sum(x.size * x.dtype.itemsize for x in arrays)
