"""Tiled attention over packed rows for GPUs: Pallas kernels for Triton.

A program processes one block of queries of one or two heads, or one block of keys, and loops over
its list of tiles with an allowed pair. Dims as in flash_loops.py; R query rows of a step, X / R
chunks of a block. FlashAttention-2: Dao 2023, arxiv.org/abs/2307.08691.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from distflow_jax.models.kernels.decode_reference import LOWEST, dot_precision
from distflow_jax.models.kernels.tiles import (
    Reach,
    Tiles,
    flash_cost,
    mask_facts,
    nbytes,
    pair_mask,
)

# tile sides: a tile of sums and two of scores and their gradients fit a program's registers
SIDES = (64,)
ROW_CHANNELS = 128 * 128  # R x H of a step's queries at most, of one or two heads: more do not fit
_LOG2_E = math.log2(math.e)  # exp2 is one instruction, exp takes a product more


def check_flash_gpu(
    *, side: int, rows: int, blocks: int, key_blocks: int, heads: int, head_dim: int, dtype: str
) -> None:
    """Raises ValueError for sizes that the kernels do not support, with one that they do.

    Any `rows`, `blocks`, `key_blocks` and `heads` are supported; head dims and dtypes are those of
    config/implementation_table.py.
    """
    if side not in SIDES:
        raise ValueError(
            f"the GPU kernel needs blocks of {SIDES[0]} tokens, got {side}: use {SIDES[0]}"
        )


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: Tiles,
    reach: Reach | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """flash_loops.forward on a GPU: q [B, n, K, X, H], k and v [B, m, K, C, H]."""
    return _call(
        _forward_kernel,
        (tiles.keys, tiles.num_keys, *mask_facts(tiles, reach), q, k, v),
        [q, jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)],
        chunks=_chunks(q, k),
        products=2,
        interpret=interpret,
    )


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: Tiles,
    reach: Reach | None,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """flash_loops.backward on a GPU: q [B, n, K, X, H], k and v [B, m, K, C, H].

    One kernel computes the gradient of q, another those of k and v.
    """
    operands = (*mask_facts(tiles, reach), q, k, v, lse, delta, d_out)
    (d_q,) = _call(
        _query_kernel,
        (tiles.keys, tiles.num_keys, *operands),
        [q],
        chunks=_chunks(q, k),
        products=3,
        interpret=interpret,
    )
    d_k, d_v = _call(
        _key_kernel,
        (tiles.queries, tiles.num_queries, *operands),
        [k, v],
        chunks=1,
        products=4,
        interpret=interpret,
    )
    return d_q, d_k, d_v


def _chunks(q: jax.Array, k: jax.Array) -> int:
    """Number of programs that divide the query rows of a block and key/value head."""
    rows, side, head_dim = q.shape[3], *k.shape[3:]
    two = rows % (2 * side) == 0 and 2 * side * head_dim <= ROW_CHANNELS
    return rows // (2 * side if two else side)


def _call(kernel, arguments, results, *, chunks, products, interpret):
    """Runs `kernel` for each block of each row, key/value head and chunk of query rows.

    Arguments [B, blocks, ...] are passed with their first two dims merged.
    """
    others, number, *operands = arguments
    rows, owners, _ = others.shape
    _, _, q, k, *_ = operands
    kv_heads, head_dim = k.shape[2], k.shape[4]

    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    # the lists have block indices within a row, the merged arrays the blocks of all rows
    first = jnp.arange(rows, dtype=jnp.int32)[:, None, None] * others.shape[2]
    found = pl.pallas_call(
        functools.partial(kernel, chunks=chunks),
        # owners first: the first dim of a grid is the one without the limit of 65,535
        grid=(rows * owners, kv_heads, chunks),
        out_shape=[
            jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), x.dtype) for x in results
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=4 if head_dim <= 64 else 8,
            num_stages=2 if head_dim <= 128 else 1,  # else too much shared memory for some GPUs
        ),
        cost_estimate=flash_cost(q, k, products=products, moved=nbytes(*operands)),
        interpret=interpret,
        name=f"flash_attention{kernel.__name__}",
    )(flat(others + first), number.reshape(-1), *map(flat, operands))
    return tuple(x.reshape(like.shape) for x, like in zip(found, results, strict=True))


def _mask(of_query, of_key, transposed=False):
    """0 for allowed pairs and LOWEST for others, float32 [R, C], or [C, R]."""
    rows, columns = (slice(None), None), (None, slice(None))
    if transposed:
        rows, columns = columns, rows
    pairs = pair_mask(*(x[rows] for x in of_query), *(x[columns] for x in of_key))
    return jnp.where(pairs, 0.0, LOWEST)


def _of_query(of_query_ref, block, rows):
    """Facts of the query rows `rows`, int32 [R], of a block, which holds head after head."""
    token = jax.lax.rem(rows, of_query_ref.shape[2])
    return [of_query_ref[block, i, token] for i in range(4)]


def _of_key(of_key_ref, block):
    return [of_key_ref[block, i, :] for i in range(3)]


def _dot(lhs, rhs):
    return plgpu.dot(lhs, rhs, precision=dot_precision(lhs.dtype))


def _rows_of_chunk(rows, chunks):
    """Start of this program's chunk of a block's query rows, and its size R."""
    size = rows // chunks
    return pl.program_id(2) * size, size


def _forward_kernel(
    keys_ref,
    number_ref,
    of_query_ref,
    of_key_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    lse_ref,
    *,
    chunks,
):
    block, head = pl.program_id(0), pl.program_id(1)
    begin, size = _rows_of_chunk(q_ref.shape[2], chunks)
    rows, head_dim = pl.ds(begin, size), q_ref.shape[3]
    q = q_ref[block, head, rows, :]
    of_query = _of_query(of_query_ref, block, begin + jnp.arange(size, dtype=jnp.int32))

    def body(index, carry):
        top, total, out = carry
        key = keys_ref[block, index]
        score = _dot(q, k_ref[key, head].T) * (head_dim**-0.5 * _LOG2_E)
        score += _mask(of_query, _of_key(of_key_ref, key))
        new_top = jnp.maximum(top, score.max(axis=1))
        # weights of a query without keys so far are 1; its first key shrinks them to 0
        weight = jnp.exp2(score - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        value = v_ref[key, head]
        update = _dot(weight.astype(value.dtype), value)
        return new_top, total * shrink + weight.sum(axis=1), out * shrink[:, None] + update

    start = (
        jnp.full((size,), LOWEST, jnp.float32),
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size, head_dim), jnp.float32),
    )
    top, total, out = jax.lax.fori_loop(0, number_ref[block], body, start)
    some = top > LOWEST / 2
    total = jnp.where(some, total, 1.0)
    out = jnp.where(some[:, None], out / total[:, None], 0.0)
    out_ref[block, head, rows, :] = out.astype(out_ref.dtype)
    lse_ref[block, head, rows] = jnp.where(some, top / _LOG2_E + jnp.log(total), 0.0)


def _query_kernel(
    keys_ref,
    number_ref,
    of_query_ref,
    of_key_ref,
    q_ref,
    k_ref,
    v_ref,
    lse_ref,
    delta_ref,
    d_out_ref,
    d_q_ref,
    *,
    chunks,
):
    block, head = pl.program_id(0), pl.program_id(1)
    begin, size = _rows_of_chunk(q_ref.shape[2], chunks)
    rows, scale = pl.ds(begin, size), q_ref.shape[3] ** -0.5
    q, d_out = q_ref[block, head, rows, :], d_out_ref[block, head, rows, :]
    lse, delta = lse_ref[block, head, rows] * _LOG2_E, delta_ref[block, head, rows]
    of_query = _of_query(of_query_ref, block, begin + jnp.arange(size, dtype=jnp.int32))

    def body(index, d_q):
        key = keys_ref[block, index]
        k = k_ref[key, head]
        score = _dot(q, k.T) * (scale * _LOG2_E) + _mask(of_query, _of_key(of_key_ref, key))
        weight = jnp.exp2(score - lse[:, None])
        d_score = weight * (_dot(d_out, v_ref[key, head].T) - delta[:, None])
        return d_q + _dot(d_score.astype(k.dtype), k)

    d_q = jax.lax.fori_loop(0, number_ref[block], body, jnp.zeros(q.shape, jnp.float32))
    d_q_ref[block, head, rows, :] = (d_q * scale).astype(d_q_ref.dtype)


def _key_kernel(
    queries_ref,
    number_ref,
    of_query_ref,
    of_key_ref,
    q_ref,
    k_ref,
    v_ref,
    lse_ref,
    delta_ref,
    d_out_ref,
    d_k_ref,
    d_v_ref,
    *,
    chunks,
):
    del chunks
    block, head = pl.program_id(0), pl.program_id(1)
    k, v = k_ref[block, head], v_ref[block, head]
    side, scale = k.shape[0], k.shape[1] ** -0.5
    heads = q_ref.shape[2] // side
    of_key = _of_key(of_key_ref, block)
    within = jnp.arange(side, dtype=jnp.int32)

    def body(index, carry):
        d_k, d_v = carry
        # head by head of each block of queries
        query, begin = queries_ref[block, jax.lax.div(index, heads)], jax.lax.rem(index, heads)
        rows = pl.ds(begin * side, side)
        q, d_out = q_ref[query, head, rows, :], d_out_ref[query, head, rows, :]
        lse, delta = lse_ref[query, head, rows] * _LOG2_E, delta_ref[query, head, rows]
        mask = _mask(_of_query(of_query_ref, query, within), of_key, transposed=True)
        score = _dot(k, q.T) * (scale * _LOG2_E) + mask
        weight = jnp.exp2(score - lse[None, :])
        d_score = weight * (_dot(v, d_out.T) - delta[None, :])
        d_v += _dot(weight.astype(d_out.dtype), d_out)
        return d_k + _dot(d_score.astype(q.dtype), q), d_v

    start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, number_ref[block] * heads, body, start)
    d_k_ref[block, head] = (d_k * scale).astype(d_k_ref.dtype)
    d_v_ref[block, head] = d_v.astype(d_v_ref.dtype)
