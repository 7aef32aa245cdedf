"""Tiled attention over packed rows for TPUs: Pallas kernels for Mosaic.

The grid runs over a list of the tiles with an allowed pair, made on the device just before; its
size is a traced number, and other tiles take no step. Several key/value heads share a step, and
with it the tile's mask. Queries lie along the lanes, so that sums over keys, log-sum-exps and a
head dim of 64 fill whole vectors. Dims as in flash_loops.py; L tiles at most, P key/value heads of
a step. FlashAttention-2: Dao 2023, arxiv.org/abs/2307.08691.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from distflow_jax.models.kernels.decode_reference import LOWEST, dot_precision
from distflow_jax.models.kernels.tiles import (
    Reach,
    Tiles,
    flash_cost,
    mask_facts,
    nbytes,
    pair_mask,
)

LANES = 128
# of tiles: a grid step of longer ones has more work, but more of a tile is masked
SIDES = (128, 256, 512)
VMEM_BYTES = 12 * 2**20  # of the 16 MiB a kernel may take by default
MAX_LISTED = 2**16  # two int32 per tile: 512 KiB of the 1 MiB of scalar memory
_SUBLANES = 8
_SCORES = 512 * 512  # of a head or several that a kernel computes at once, at least one head's


def check_flash_tpu(
    *, side: int, rows: int, blocks: int, key_blocks: int, heads: int, head_dim: int, dtype: str
) -> None:
    """Raises ValueError for sizes that the kernels do not support, with one that they do.

    `rows` rows or shards of rows have `blocks` blocks of queries and `key_blocks` of keys, of
    `side` tokens each. `heads` are query heads per key/value head.
    """
    if side % LANES:
        raise ValueError(
            f"the TPU kernel needs blocks of a multiple of {LANES} tokens (a vector's lanes), got "
            f"{side}: use {-(-side // LANES) * LANES}"
        )
    tiles = rows * blocks * key_blocks
    if tiles > MAX_LISTED:
        raise ValueError(
            f"the TPU kernel lists at most {MAX_LISTED} tiles of {side} x {side} tokens, and "
            f"{rows} rows of {blocks} x {key_blocks} may hold {tiles}: use fewer rows at a time, "
            "or more devices of mesh.context for one"
        )
    needed = _vmem_bytes(1, _Size(side, heads * side, head_dim, jnp.dtype(dtype)))
    if needed > VMEM_BYTES:
        raise ValueError(
            f"the TPU kernel needs {needed} bytes of VMEM for {heads} query heads x {side} tokens "
            f"with a head dim of {head_dim}, and {VMEM_BYTES} fit: use attention='blocks'"
        )


class _Size(NamedTuple):
    """Sizes of a tile for one key/value head."""

    side: int  # C
    rows: int  # X
    head_dim: int
    dtype: jnp.dtype


def _size(q: jax.Array, k: jax.Array) -> _Size:
    return _Size(k.shape[3], *q.shape[3:], q.dtype)


def _vmem_bytes(kv_heads: int, size: _Size) -> int:
    """VMEM of the largest step, that of the kernel for keys in the backward pass."""
    side, rows, head_dim, dtype = size
    lanes = -(-head_dim // LANES) * LANES
    # all but the sums twice: one buffer is computed with while the other is copied
    queries = 2 * 2 * rows * (head_dim * dtype.itemsize + _SUBLANES * 4)
    keys = (4 * 2 * dtype.itemsize + 2 * 4) * side * lanes
    scores = 4 * 4 * side * _part(side, rows)
    return kv_heads * (queries + keys) + scores


def _part(side: int, rows: int) -> int:
    """Query rows of a key/value head whose scores a kernel computes at once: of whole heads."""
    heads = rows // side
    fitting = (n for n in range(heads, 0, -1) if heads % n == 0 and n * side**2 <= _SCORES)
    return side * next(fitting, 1)


def _heads_of_step(kv_heads: int, size: _Size) -> int:
    """Key/value heads of a step: as many as fit, at most half, for chips of two cores."""
    divide = (n for n in range(1, max(1, kv_heads // 2) + 1) if kv_heads % n == 0)
    return max((n for n in divide if _vmem_bytes(n, size) <= VMEM_BYTES), default=1)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: Tiles,
    reach: Reach | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """flash_loops.forward on a TPU: q [B, n, K, X, H], k and v [B, m, K, C, H]."""
    of_query, of_key = _facts(tiles, reach)
    queries, keys = [of_query, q.mT], [of_key, k, v]
    per_row = jax.ShapeDtypeStruct((*q.shape[:3], 1, q.shape[3]), jnp.float32)
    out, lse = _over_tiles(
        _forward_kernel,
        listed_tiles(tiles.keys, tiles.num_keys),
        queries,
        keys,
        [jax.ShapeDtypeStruct(q.mT.shape, q.dtype), per_row],
        sums=[per_row.shape, per_row.shape, q.mT.shape],
        size=_size(q, k),
        cost=flash_cost(q, k, products=2, moved=nbytes(*queries, *keys)),
        interpret=interpret,
    )
    # a block of queries without keys has no step, so its result is never written
    seen = (tiles.num_keys > 0)[:, :, None, None]
    return jnp.where(seen[..., None], out.mT, 0), jnp.where(seen, lse[:, :, :, 0], 0.0)


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
    """flash_loops.backward on a TPU: q [B, n, K, X, H], k and v [B, m, K, C, H].

    One kernel computes the gradient of q, another those of k and v.
    """
    of_query, of_key = _facts(tiles, reach)
    queries = [of_query, q.mT, d_out.mT, lse[:, :, :, None], delta[:, :, :, None]]
    keys = [of_key, k, v]
    (d_q,) = _over_tiles(
        _query_kernel,
        listed_tiles(tiles.keys, tiles.num_keys),
        queries,
        keys,
        [jax.ShapeDtypeStruct(q.mT.shape, q.dtype)],
        sums=[q.mT.shape],
        size=_size(q, k),
        cost=flash_cost(q, k, products=3, moved=nbytes(*queries, *keys)),
        interpret=interpret,
    )
    d_k, d_v = _over_tiles(
        _key_kernel,
        listed_tiles(tiles.queries, tiles.num_queries),
        keys,
        queries,
        [jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        sums=[k.shape, v.shape],
        size=_size(q, k),
        cost=flash_cost(q, k, products=4, moved=nbytes(*queries, *keys)),
        interpret=interpret,
    )
    d_q = jnp.where((tiles.num_keys > 0)[:, :, None, None, None], d_q.mT, 0)
    seen = (tiles.num_queries > 0)[:, :, None, None, None]
    return d_q, jnp.where(seen, d_k, 0), jnp.where(seen, d_v, 0)


def listed_tiles(
    others_BOM: jax.Array, number_BO: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """List of tiles, owner by owner: (owner, other), block indices over all rows int32 [L + 1].

    Owners are the O blocks of one side, others the M blocks of the other side. `others_BOM` int32
    lists each owner's blocks to visit first, `number_BO` their number. Third, the number of tiles
    is returned, at least 1, as a grid needs a step; entries from there on have owner -1.
    """
    rows, owners, others = others_BOM.shape
    number = number_BO.reshape(-1)
    end = jnp.cumsum(number, dtype=jnp.int32)
    index = jnp.arange(rows * owners * others + 1, dtype=jnp.int32)
    # the number of owners that end at or before it, in one pass; a binary search would be a loop
    owner = (end[None] <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, rows * owners - 1)
    nth = jnp.clip(index - (end - number)[owner], 0, others - 1)
    other = owner // owners * others + others_BOM.reshape(-1, others)[owner, nth]
    count = jnp.maximum(end[-1], 1)
    return jnp.where(index < count, owner, -1), other, count


def _facts(tiles: Tiles, reach: Reach | None) -> list[jax.Array]:
    """mask_facts padded to whole vectors: [B, n, 8, C] of queries and [B, m, 8, C] of keys."""
    facts = mask_facts(tiles, reach)
    return [jnp.pad(x, ((0, 0), (0, 0), (0, _SUBLANES - x.shape[2]), (0, 0))) for x in facts]


def _over_tiles(kernel, listed, owners, others, results, *, sums, size, cost, interpret):
    """Runs `kernel` over the listed tiles; returns `results`, per block of the owners.

    Args:
      owners: operands of the owners' side: mask facts, then arrays [B, blocks, K, ...].
      others: operands of the other side.
      sums: shapes of float32 accumulators that live from the first to the last tile of an owner.
      size: sizes of a tile for one key/value head.
    """
    owner_L, other_L, count = listed
    kv_heads = owners[1].shape[2]
    share = _heads_of_step(kv_heads, size)

    def of_owner(group, step, owner, other):
        return owner[step], group, 0, 0

    def of_other(group, step, owner, other):
        return other[step], group, 0, 0

    def spec(x, index):
        if len(x.shape) == 4:  # mask facts, the same for all heads
            return pl.BlockSpec((1, *x.shape[2:]), lambda *at: (index(*at)[0], 0, 0))
        return pl.BlockSpec((1, share, *x.shape[3:]), index)

    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    found = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(kv_heads // share, count),
            in_specs=[spec(x, of_owner) for x in owners] + [spec(x, of_other) for x in others],
            out_specs=[spec(x, of_owner) for x in results],
            scratch_shapes=[pltpu.VMEM((share, *shape[3:]), jnp.float32) for shape in sums],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), x.dtype) for x in results
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=cost,
        interpret=interpret,
        name=f"flash_attention{kernel.__name__}",
    )(owner_L, other_L, *map(flat, owners), *map(flat, others))
    return tuple(x.reshape(like.shape) for x, like in zip(found, results, strict=True))


def _ends(owner_ref):
    """Whether this step is the first of its owner, and whether it is the last."""
    step = pl.program_id(1)
    owner = owner_ref[step]
    first = (step == 0) | (owner_ref[jnp.maximum(step - 1, 0)] != owner)
    return first, owner_ref[step + 1] != owner


def _mask_of_parts(of_query_ref, of_key_ref, rows):
    """0 for allowed pairs and LOWEST for others, float32 [C, part], and the parts of the rows.

    It is the same for all query heads, so for all parts of the `rows` query rows.
    """
    of_query = (of_query_ref[0, i : i + 1] for i in range(4))
    of_key = (of_key_ref[0].T[:, i : i + 1] for i in range(3))
    side = of_query_ref.shape[2]
    part = _part(side, rows)
    mask = jnp.where(pair_mask(*of_query, *of_key), 0.0, LOWEST)
    return jnp.tile(mask, (1, part // side)), [slice(i, i + part) for i in range(0, rows, part)]


def _dot(lhs, rhs, contract):
    """Product in float32, contracting dim `contract[0]` of `lhs` with `contract[1]` of `rhs`."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    precision = dot_precision(lhs.dtype)
    return jax.lax.dot_general(
        lhs, rhs, dims, precision=precision, preferred_element_type=jnp.float32
    )


def _forward_kernel(
    owner_ref,
    other_ref,
    of_query_ref,
    q_ref,
    of_key_ref,
    k_ref,
    v_ref,
    out_ref,
    lse_ref,
    top_ref,
    total_ref,
    sum_ref,
):
    first, last = _ends(owner_ref)
    share, head_dim, rows = q_ref.shape[1:]

    @pl.when(first)
    def _():
        top_ref[...] = jnp.full(top_ref.shape, LOWEST, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    mask, parts = _mask_of_parts(of_query_ref, of_key_ref, rows)
    for head, of in itertools.product(range(share), parts):
        score = _dot(k_ref[0, head], q_ref[0, head, :, of], (1, 0)) * head_dim**-0.5 + mask
        top = top_ref[head, :, of]
        new_top = jnp.maximum(top, score.max(axis=0, keepdims=True))
        # weights of a query without keys so far are 1; its first key shrinks them to 0
        weight = jnp.exp(score - new_top)
        shrink = jnp.exp(top - new_top)
        value = v_ref[0, head]
        update = _dot(value, weight.astype(value.dtype), (0, 0))
        top_ref[head, :, of] = new_top
        total = weight.sum(axis=0, keepdims=True)
        total_ref[head, :, of] = total_ref[head, :, of] * shrink + total
        sum_ref[head, :, of] = sum_ref[head, :, of] * shrink + update

    @pl.when(last)
    def _():
        for head in range(share):
            top, total = top_ref[head], total_ref[head]
            some = top > LOWEST / 2
            out = jnp.where(some, sum_ref[head] / total, 0.0)
            out_ref[0, head] = out.astype(out_ref.dtype)
            lse_ref[0, head] = jnp.where(some, top + jnp.log(total), 0.0)


def _weights(head, of, mask, q_ref, d_out_ref, lse_ref, delta_ref, k_ref, v_ref):
    """Weights [C, part] of a part of one head, and the gradient of its scores without their
    scale."""
    query, d_out = q_ref[0, head, :, of], d_out_ref[0, head, :, of]
    score = _dot(k_ref[0, head], query, (1, 0)) * query.shape[0] ** -0.5 + mask
    weight = jnp.exp(score - lse_ref[0, head, :, of])
    d_weight = _dot(v_ref[0, head], d_out, (1, 0))
    d_score = weight * (d_weight - delta_ref[0, head, :, of])
    return weight.astype(query.dtype), d_score.astype(query.dtype)


def _query_kernel(
    owner_ref,
    other_ref,
    of_query_ref,
    q_ref,
    d_out_ref,
    lse_ref,
    delta_ref,
    of_key_ref,
    k_ref,
    v_ref,
    d_q_ref,
    sum_ref,
):
    first, last = _ends(owner_ref)
    share, head_dim, rows = q_ref.shape[1:]

    @pl.when(first)
    def _():
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    mask, parts = _mask_of_parts(of_query_ref, of_key_ref, rows)
    refs = q_ref, d_out_ref, lse_ref, delta_ref, k_ref, v_ref
    for head, of in itertools.product(range(share), parts):
        _, d_score = _weights(head, of, mask, *refs)
        sum_ref[head, :, of] += _dot(k_ref[0, head], d_score, (0, 0))

    @pl.when(last)
    def _():
        d_q_ref[0] = (sum_ref[...] * head_dim**-0.5).astype(d_q_ref.dtype)


def _key_kernel(
    owner_ref,
    other_ref,
    of_key_ref,
    k_ref,
    v_ref,
    of_query_ref,
    q_ref,
    d_out_ref,
    lse_ref,
    delta_ref,
    d_k_ref,
    d_v_ref,
    sum_k_ref,
    sum_v_ref,
):
    first, last = _ends(owner_ref)
    share, head_dim, rows = q_ref.shape[1:]

    @pl.when(first)
    def _():
        sum_k_ref[...] = jnp.zeros(sum_k_ref.shape, jnp.float32)
        sum_v_ref[...] = jnp.zeros(sum_v_ref.shape, jnp.float32)

    mask, parts = _mask_of_parts(of_query_ref, of_key_ref, rows)
    refs = q_ref, d_out_ref, lse_ref, delta_ref, k_ref, v_ref
    for head, of in itertools.product(range(share), parts):
        weight, d_score = _weights(head, of, mask, *refs)
        sum_v_ref[head] += _dot(weight, d_out_ref[0, head, :, of], (1, 1))
        sum_k_ref[head] += _dot(d_score, q_ref[0, head, :, of], (1, 1))

    @pl.when(last)
    def _():
        d_k_ref[0] = (sum_k_ref[...] * head_dim**-0.5).astype(d_k_ref.dtype)
        d_v_ref[0] = sum_v_ref[...].astype(d_v_ref.dtype)
