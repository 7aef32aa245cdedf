"""What a kernel over tiles of attention costs at most, for XLA's schedule and for plans of runs."""

import jax
from jax.experimental import pallas as pl


def flash_cost(
    q: jax.Array, k: jax.Array, others: jax.Array, *, products: int, moved: int
) -> pl.CostEstimate:
    """Were every tile of `others` [B, O, M] listed: `products` of matrices in each.

    q [B, n, K, X, H] and k [B, m, K, C, H]; `moved`: bytes read, each once.
    """
    scores = others.size * k.shape[2] * k.shape[3] * q.shape[3]
    return pl.CostEstimate(
        flops=2 * products * scores * q.shape[4], transcendentals=scores, bytes_accessed=moved
    )


def nbytes(*arrays: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of all of them."""
    return sum(x.size * x.dtype.itemsize for x in arrays)
