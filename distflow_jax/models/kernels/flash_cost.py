"""Cost estimates of tiled attention kernels, for XLA's scheduler and for plans of runs."""

import jax
from jax.experimental import pallas as pl


def flash_cost(q: jax.Array, k: jax.Array, *, products: int, moved: int) -> pl.CostEstimate:
    """Upper bound of a kernel's cost, reached if every row is a single sequence.

    The kernel computes `products` matrix products in each tile on or below the diagonal and reads
    `moved` bytes, each once. q is [B, n, K, X, H], k [B, m, K, C, H]. A whole row has at most
    m (m + 1) / 2 tiles under any packing, divided equally among the shards of a row.
    """
    rows, blocks, kv_heads, queries, head_dim = q.shape
    tiles = rows * blocks * (k.shape[1] + 1) // 2
    scores = tiles * kv_heads * queries * k.shape[3]
    return pl.CostEstimate(
        flops=2 * products * scores * head_dim, transcendentals=scores, bytes_accessed=moved
    )


def nbytes(*arrays: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Total bytes of the arrays, of any shape."""
    return sum(x.size * x.dtype.itemsize for x in arrays)
