"""Block-sparse packed attention: tiles in which no query may attend to a key are skipped.

B rows or shards of rows, T tokens of one, S tokens of a whole row, C tokens of a block, n = T / C
and m = S / C blocks, N heads, K key/value heads, G = N / K heads per key/value head, X = G C query
rows of a block, H head dim.

A row of many short sequences, or of a causal one, needs less than half of its [T, T] scores. In
layers with a sliding window tiles outside the window are skipped, too. Only one tile's scores exist
at a time; the backward pass recomputes them from the log-sum-exps (FlashAttention-2: Dao 2023,
arxiv.org/abs/2307.08691, algorithms 1 and 2).
"""

import functools

import jax
import jax.numpy as jnp

from distflow_jax.models.kernels import flash_gpu, flash_loops, flash_tpu
from distflow_jax.models.kernels.tiles import Reach, Tiles
from distflow_jax.models.remat import ATTENTION, named

# (forward, backward), with the signatures of flash_loops
IMPLEMENTATIONS = {
    "loops": (flash_loops.forward, flash_loops.backward),
    "gpu": (flash_gpu.forward, flash_gpu.backward),
    "tpu": (flash_tpu.forward, flash_tpu.backward),
}


def block_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    tiles: Tiles,
    across: tuple[str, ...] = (),
    reach: Reach | None = None,
    implementation: str = "loops",
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k / sqrt(H)) v over the pairs that packed_mask allows, [B, T, N, H] like q.

    Scores and sums are float32; tokens of segment 0 give 0. Call it per device (see
    parallel.rules.local), on whole rows or row shards and whole heads: the tiles to visit differ
    from row to row.

    Args:
      tiles: tiles to visit; with `reach` all that hold a pair within its window.
      across: mesh axes over which a row's shards are divided. Keys and values are gathered over
        them, and again in the backward pass instead of being kept.
      reach: limits the pairs to a sliding window.
      implementation: one of IMPLEMENTATIONS: loops on a CPU, the device's kernel elsewhere.
      sinks_N: as of masked_attention. A sink scales the output by sigmoid(lse - sink), so no kernel
        has to know it.
    """
    rows, length, heads, head_dim = q_BTNH.shape
    kv_heads, size = k_BTKH.shape[2], tiles.segment.shape[2]
    blocks = length // size
    # query heads of one key/value head side by side: one product for all of them
    q = q_BTNH.reshape(rows, blocks, size, kv_heads, heads // kv_heads, head_dim)
    q = q.transpose(0, 1, 3, 4, 2, 5).reshape(rows, blocks, kv_heads, -1, head_dim)
    k, v = (
        x.reshape(rows, blocks, size, kv_heads, head_dim).swapaxes(2, 3) for x in (k_BTKH, v_BTKH)
    )
    if reach is not None:
        reach = reach._replace(
            position_BT=reach.position_BT.reshape(tiles.segment.shape),
            key_position_BS=reach.key_position_BS.reshape(tiles.key_segment.shape),
        )
    out, lse = _attention(q, k, v, tiles, reach, across, implementation)
    if sinks_N is not None:
        sinks = jnp.repeat(sinks_N.astype(jnp.float32).reshape(kv_heads, -1), size, axis=1)
        out *= jax.nn.sigmoid(lse - sinks[None, None])[..., None].astype(out.dtype)
    out = out.reshape(rows, blocks, kv_heads, heads // kv_heads, size, head_dim)
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(q_BTNH.shape)


def _gathered(x: jax.Array, across: tuple[str, ...]) -> jax.Array:
    """[B, n, ...] -> [B, m, ...]: the blocks of all shards of a row, in the shards' order."""
    return jax.lax.all_gather(x, across, axis=1, tiled=True) if across else x


def _summed(x: jax.Array, across: tuple[str, ...]) -> jax.Array:
    """[B, m, ...] -> [B, n, ...]: the transpose of _gathered."""
    return jax.lax.psum_scatter(x, across, scatter_dimension=1, tiled=True) if across else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: Tiles,
    reach: Reach | None,
    across: tuple[str, ...],
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, n, K, X, H] over k and v [B, n, K, C, H], shaped as q, and the
    log-sum-exps of scores [B, n, K, X], 0 where a query has no keys.

    Positions of `reach` are [B, n, C] and [B, m, C].
    """
    return _forward(q, k, v, tiles, reach, across, implementation)[0]


def _forward(q, k, v, tiles, reach, across, implementation):
    forward, _ = IMPLEMENTATIONS[implementation]
    found = forward(q, _gathered(k, across), _gathered(v, across), tiles, reach)
    # named here, because these are the arrays that the backward pass takes
    out, lse = (named(ATTENTION, x) for x in found)
    return (out, lse), (q, k, v, tiles, reach, out, lse)


def _backward(across, implementation, residuals, gradients):
    d_out, d_lse = gradients
    q, k, v, tiles, reach, out, lse = residuals
    _, backward = IMPLEMENTATIONS[implementation]
    k, v = _gathered(k, across), _gathered(v, across)
    # sum over the keys of weight * its gradient (the paper's D)
    delta = jnp.einsum("BnKXH,BnKXH->BnKX", d_out, out, preferred_element_type=jnp.float32)
    delta -= d_lse  # a score's gradient is weight * (its gradient - D + that of the log-sum-exp)
    d_q, d_k, d_v = backward(q, k, v, tiles, reach, lse, delta, d_out)
    return d_q, _summed(d_k, across), _summed(d_v, across), None, None


_attention.defvjp(_forward, _backward)
