"""Decode attention over KV pages for TPUs: a Pallas kernel for Mosaic.

The grid runs over a list of the pages in use, owner by owner, which is made on the device just
before; the grid's size is the traced number of these pages. Pallas' pipeline therefore copies
exactly the used pages, all key/value heads of a page in one copy, and overlaps the copy of the next
page, of any owner, with the computation of this one. In layers with a window, pages before the
window are not listed. Dims as in decode_reference.py; L pages in use.

Where S slots share owners, queries and results stay those of slots, whole in VMEM, and the kernel
brings the rows of an owner's M members together. In HBM these would be M rows for each owner, read
by slots or not, which XLA would rearrange several times.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from distflow_jax.models.kernels.decode_reference import LOWEST, dot_dtype, dot_precision
from distflow_jax.models.kernels.merge_partial import PartialAttention
from distflow_jax.models.kernels.tiles import nbytes

LANES = 128
VMEM_BYTES = 12 * 2**20  # of the 16 MiB a kernel may take by default
MAX_LISTED = 2**16  # three int32 per page: 768 KiB of the 1 MiB of scalar memory
MAX_MEMBERS = 2**14  # an int32 each in scalar memory too
MAX_MOVES = 256  # of a member's rows of one head, which are unrolled


class Members(NamedTuple):
    """Slots that read the pages of owners."""

    table: jax.Array  # int32 [O, M]: the slots that read each owner; S for none
    owner: jax.Array  # int32 [S]: the owner that each slot reads; out of range for none
    number: jax.Array  # int32 [S]: its place in the table among those that read it


def check_tpu(
    q: jax.Array, key_pages: jax.Array, table: jax.Array, *, windowed: bool = False
) -> None:
    """Raises ValueError for shapes that the kernel does not support, with one that it does.

    q is [O, K, R, H], key_pages [N, K, H, W], table [O, C].
    """
    head_dim, width = key_pages.shape[-2:]
    if width % LANES:
        raise ValueError(
            f"the TPU kernel needs pages of a multiple of {LANES} tokens (a vector's lanes), got "
            f"{width}: use {-(-width // LANES) * LANES}"
        )
    if head_dim % 16:
        raise ValueError(
            f"the TPU kernel needs a head dim that is a multiple of 16, got {head_dim}: use "
            'implementation="reference"'
        )
    vmem = _vmem_bytes(q, key_pages, windowed)
    if vmem > VMEM_BYTES:
        raise ValueError(
            f"the TPU kernel needs {vmem} bytes of VMEM for queries {list(q.shape[1:])} and pages "
            f"{list(key_pages.shape[1:])}, and {VMEM_BYTES} fit: use fewer than {q.shape[2]} query "
            f"rows per call, or pages shorter than {width} tokens"
        )
    if table.size > MAX_LISTED:
        raise ValueError(
            f"the TPU kernel lists at most {MAX_LISTED} pages, and a table of "
            f"{list(table.shape)} may hold {table.size}: use pages longer than {width} tokens, or "
            "fewer owners per call"
        )


def _vmem_bytes(q: jax.Array, key_pages: jax.Array, windowed: bool) -> int:
    _, kv_heads, rows, head_dim = q.shape
    width, lanes = key_pages.shape[-1], -(-head_dim // LANES) * LANES
    # all but the running sums twice: one buffer is computed with while the other is copied
    pages = 2 * kv_heads * width * (head_dim + lanes) * key_pages.dtype.itemsize
    per_row = 2 * lanes * (dot_dtype(q, key_pages).itemsize + 4) + 2 * LANES * 4
    sums = (lanes + 2 * LANES) * 4
    padded = -(-rows // 16) * 16
    firsts = 2 * LANES * 4 * padded if windowed else 0
    return pages + kv_heads * padded * (per_row + sums) + firsts


def gathers_members(
    q: jax.Array, key_pages: jax.Array, members: Members, *, windowed: bool = False
) -> bool:
    """Whether the kernel takes the rows of slots, q [S, K, R, H], for pages [N, K, H, W]."""
    slots, kv_heads, rows, head_dim = q.shape
    owners, number = members.table.shape
    rows_of_owner = number * rows
    of_owner = jax.ShapeDtypeStruct((owners, kv_heads, rows_of_owner, head_dim), q.dtype)
    lanes = -(-head_dim // LANES) * LANES
    # in float32: queries and results with the lse of all slots; queries of an owner
    of_slots = slots * kv_heads * -(-rows // 8) * 8 * (2 * lanes + LANES) * 4
    of_slots += kv_heads * -(-rows_of_owner // 16) * 16 * lanes * 4
    fits = of_slots + _vmem_bytes(of_owner, key_pages, windowed) <= VMEM_BYTES
    return fits and kv_heads * number <= MAX_MOVES and members.table.size <= MAX_MEMBERS


def tpu_attention(
    q_OKRH: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    table_OC: jax.Array,
    length_O: jax.Array,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    first_OR: jax.Array | None = None,
    *,
    members: Members | None = None,
    most_pages: int = 0,
    interpret: bool = False,
) -> PartialAttention:
    """`decode_attention.partial_attention` on a TPU core, with the same shapes [O, K, R, H].

    With `members`, for which `gathers_members` must hold, queries and results are those of slots,
    [S, K, R, H] and [S, K, R], and first_OR is int32 [O, M R].
    """
    _, kv_heads, rows, head_dim = q_OKRH.shape
    width, owners = key_pages.shape[-1], len(length_O)
    dtype = dot_dtype(q_OKRH, key_pages)
    rows *= 1 if members is None else members.table.shape[1]
    of_owners = jax.ShapeDtypeStruct((owners, kv_heads, rows, head_dim), q_OKRH.dtype)
    check_tpu(of_owners, key_pages, table_OC, windowed=first_OR is not None)
    padding = -rows % 16  # a tile of bfloat16 has 16 rows
    padded = rows + padding
    if members is None:
        q = jnp.pad(q_OKRH.astype(dtype), ((0, 0), (0, 0), (0, padding), (0, 0)))
    else:
        q = q_OKRH.astype(jnp.float32)  # rows of a member may begin within a tile of bfloat16
    begin_O = None  # where each owner's first listed page begins
    if first_OR is not None:
        begin_O = jnp.maximum(first_OR.min(-1), 0) // width * width
    owner_L, first_L, page_L, count = used_pages(table_OC, length_O, width, begin_O)
    # XLA stores [W, 64] with W along the lanes, since 64 of 128 lanes would be padding. Passed
    # transposed, pages are not copied; as [W, 64], all N are copied before every call.
    transposed = head_dim % LANES != 0
    if transposed:
        value_pages = value_pages.swapaxes(2, 3)

    def of_owner(step, owner, first, page, *_):
        return owner[step], 0, 0, 0

    def first_of_owner(step, owner, first, page, *_):
        return owner[step], 0, 0

    def of_page(step, owner, first, page, *_):
        return page[step], 0, 0, 0

    def scale_of_page(step, owner, first, page, *_):
        return page[step], 0, 0

    scales = () if key_scale is None or value_scale is None else (key_scale, value_scale)
    if not interpret:  # XLA would copy the scales of all pages to VMEM before each call
        scales = tuple(pltpu.with_memory_space_constraint(s, pltpu.HBM) for s in scales)
    begins, firsts, tables, gathered = (), (), (), ()
    if first_OR is not None:
        begins = (begin_O,)
        firsts = (jnp.pad(first_OR, ((0, 0), (0, padding)))[..., None],)
    of_queries = pl.BlockSpec((1, kv_heads, padded, head_dim), of_owner)
    of_results = of_queries, pl.BlockSpec((1, kv_heads, padded, 1), of_owner)
    if members is not None:
        tables = (members.table.reshape(-1),)
        gathered = (pltpu.VMEM((kv_heads, padded, head_dim), dtype),)
        of_queries, *of_results = (
            pl.BlockSpec(shape, lambda *_: (0, 0, 0, 0), pipeline_mode=pl.Buffered(1))
            for shape in (q.shape, q.shape, (*q.shape[:3], 1))
        )
    scalars = [owner_L, first_L, page_L, length_O, *begins, *tables]
    operands = [q, key_pages, value_pages, *firsts, *scales]
    listed = most_pages or table_OC.size
    scores = listed * kv_heads * rows * width
    of_pages = nbytes(key_pages, value_pages, *scales) // key_pages.shape[0] * listed
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            transposed=transposed,
            windowed=first_OR is not None,
            members=0 if members is None else members.table.shape[1],
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[
                of_queries,
                pl.BlockSpec((1, kv_heads, head_dim, width), of_page),
                pl.BlockSpec((1, *value_pages.shape[1:]), of_page),
                *[pl.BlockSpec((1, padded, 1), first_of_owner) for _ in firsts],
                *[pl.BlockSpec((1, kv_heads, width), scale_of_page) for _ in scales],
            ],
            out_specs=tuple(of_results),
            scratch_shapes=[
                pltpu.VMEM((kv_heads, padded, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, padded, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, padded, head_dim), jnp.float32),
                *gathered,
            ],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct((*q.shape[:3], 1), jnp.float32),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        # all pages are operands, those in use alone are read
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * head_dim,
            transcendentals=scores,
            bytes_accessed=of_pages + nbytes(q, *firsts),
        ),
        interpret=interpret,
        name="paged_decode_attention",
    )(*scalars, *operands)
    # an owner without tokens has no step, so its block is never written
    some = length_O > (0 if begin_O is None else begin_O)
    if members is not None:
        known = (members.owner >= 0) & (members.owner < owners)
        some = known & some[jnp.clip(members.owner, 0, owners - 1)]
    some, rows = some[:, None, None], q_OKRH.shape[2]
    lse = jnp.where(some, lse[:, :, :rows, 0], -jnp.inf)
    return jnp.where(some[..., None], out[:, :, :rows], 0.0), lse


def used_pages(
    table_OC: jax.Array, length_O: jax.Array, width: int, begin_O: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """List of the pages in use, owner by owner: (owner, first position, page), int32 [O C], count.

    `begin_O` int32: position of the first token of each owner's first page to list, a multiple of
    `width`; None: 0. Entries from `count` on are 0. `count` is at least 1, as a grid needs a step.
    """
    owners, slots = table_OC.shape
    used_O = -(-length_O // width)
    if begin_O is not None:
        used_O = jnp.maximum(used_O - begin_O // width, 0)
    end_O = jnp.cumsum(used_O)
    index = jnp.arange(owners * slots, dtype=jnp.int32)
    # the number of owners that end at or before it, in one pass; a binary search would be a loop
    owner = (end_O[None] <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    listed = index < end_O[-1]
    owner = jnp.where(listed, owner, 0)
    slot = index - (end_O - used_O)[owner]
    if begin_O is not None:
        slot += begin_O[owner] // width
    slot = jnp.where(listed, slot, 0)
    page = jnp.where(listed, table_OC[owner, slot], 0)
    return owner, slot * width, page, jnp.maximum(end_O[-1], 1)


def _kernel(owner_ref, first_ref, page_ref, length_ref, *refs, transposed, windowed, members):
    begin_ref, *refs = refs if windowed else (None, *refs)
    member_ref, *refs = refs if members else (None, *refs)
    q_ref, key_ref, value_ref, *refs = refs
    first_seen_ref, *refs = refs if windowed else (None, *refs)
    *refs, rows_ref = refs if members else (*refs, q_ref.at[0])
    *scale_refs, out_ref, lse_ref, top_ref, total_ref, sum_ref = refs
    key_scale_ref, value_scale_ref = scale_refs or (None, None)
    step = pl.program_id(0)
    first, length = first_ref[step], length_ref[owner_ref[step]]
    begin = begin_ref[owner_ref[step]] if windowed else 0
    kv_heads, rows, head_dim = rows_ref.shape
    width = key_ref.shape[-1]
    dtype = rows_ref.dtype
    precision = dot_precision(dtype)
    own_rows = [(m, pl.ds(m * q_ref.shape[2], q_ref.shape[2])) for m in range(members)]

    def slot_of(member):
        return member_ref[owner_ref[step] * members + member]

    def put(slot, mine):
        @pl.when(slot < q_ref.shape[0])
        def _():
            for head in range(kv_heads):
                out_ref[slot, head] = sum_ref[head, mine]
                lse_ref[slot, head] = top_ref[head, mine, :1]

    @pl.when(first == begin)
    def _():
        top_ref[...] = jnp.full(top_ref.shape, LOWEST, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        if members:
            for member, mine in own_rows:
                slot = jnp.minimum(slot_of(member), q_ref.shape[0] - 1)
                for head in range(kv_heads):
                    sum_ref[head, mine] = q_ref[slot, head]
            rows_ref[...] = sum_ref[...].astype(dtype)
            sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    token = first + jax.lax.broadcasted_iota(jnp.int32, (rows, width), 1)
    valid = token < length
    if windowed:
        valid &= token >= first_seen_ref[0]
    value_shape, token_dim = ((head_dim, width), 1) if transposed else ((width, head_dim), 0)
    value_valid = first + jax.lax.broadcasted_iota(jnp.int32, value_shape, token_dim) < length

    # head by head: Mosaic compiles plain matrix products best
    for head in range(kv_heads):
        score = jnp.dot(
            rows_ref[head],
            key_ref[0, head].astype(dtype),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        score *= head_dim**-0.5
        if key_scale_ref is not None:
            score *= key_scale_ref[0, head : head + 1, :]
        score = jnp.where(valid, score, LOWEST)
        top = top_ref[head, :, :1]
        new_top = jnp.maximum(top, score.max(axis=1, keepdims=True))
        shrink = jnp.exp(top - new_top)
        # where: all scores of a row without keys so far are LOWEST
        weight = jnp.where(valid, jnp.exp(score - new_top), 0.0)
        total = total_ref[head, :, :1] * shrink + weight.sum(axis=1, keepdims=True)
        if value_scale_ref is not None:
            weight = jnp.where(valid, weight * value_scale_ref[0, head : head + 1, :], 0.0)
        # select in float32: not every TPU selects in 16 or 8 bits
        value = jnp.where(value_valid, value_ref[0, head].astype(jnp.float32), 0.0)
        update = jax.lax.dot_general(
            weight.astype(dtype),
            value.astype(dtype),
            (((1,), (token_dim,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        top_ref[head] = jnp.broadcast_to(new_top, (rows, LANES))
        total_ref[head] = jnp.broadcast_to(total, (rows, LANES))
        sum_ref[head] = sum_ref[head] * shrink + update

    @pl.when(first + width >= length)
    def _():
        for head in range(kv_heads):
            total = total_ref[head, :, :1]
            divisor = jnp.where(total > 0.0, total, 1.0)
            out = sum_ref[head] / divisor
            lse = top_ref[head, :, :1] + jnp.log(divisor)
            # without windows every row of an owner has a key
            lse = jnp.where(total > 0.0, lse, -jnp.inf) if windowed else lse
            if members:
                sum_ref[head], top_ref[head] = out, jnp.broadcast_to(lse, (rows, LANES))
            else:
                out_ref[0, head], lse_ref[0, head] = out, lse
        for member, mine in own_rows:
            put(slot_of(member), mine)
