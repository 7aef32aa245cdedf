"""Decode attention over KV pages for GPUs: a Pallas kernel for Triton.

One program reads a range of one owner's tokens for one key/value head and up to 64 query rows. The
partial attention of an owner's ranges is merged afterwards (flash-decoding, Dao et al. 2023,
crfm.stanford.edu/2023/10/12/flashdecoding.html), so that few long owners still fill the GPU. Dims
as in decode_reference.py; T tokens per step of a program.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from distflow_jax.models.kernels.decode_reference import LOWEST, dot_dtype, dot_precision
from distflow_jax.models.kernels.merge_partial import PartialAttention, merge_stacked

MIN_ROWS = 16  # Triton's products need 16 rows; fewer are padded
# More rows would spill registers; a further program reads the pages again (from L2). Tensor cores
# do not take float32, and its products need far more registers.
MAX_ROWS = {"bfloat16": 64, "float32": 16}
TARGET_PROGRAMS = 512  # about four per multiprocessor of an A100 or H100
MAX_SPLITS = 32


def check_gpu(q: jax.Array, key_pages: jax.Array) -> None:
    """Raises ValueError for shapes that the kernel does not support, with one that it does.

    q is [O, K, R, H], key_pages [N, K, H, W].
    """
    head_dim, width = key_pages.shape[-2:]
    if not (_is_power_of_two(head_dim) and 16 <= head_dim <= 256):
        raise ValueError(
            f"the GPU kernel needs a head dim of 16, 32, 64, 128 or 256 (Triton's blocks are powers"
            f' of two), got {head_dim}: use implementation="reference"'
        )
    if not _is_power_of_two(width):
        raise ValueError(
            "the GPU kernel needs pages with a power of two of tokens, got "
            f"{width}: use {2 ** round(math.log2(width))}"
        )
    if key_pages.dtype == jnp.int8 and 2**31 < key_pages.size <= 2**32:
        # Pallas counts with 32 bits up to 4 GiB, and Triton reads them as signed
        fitting = 2**31 * len(key_pages) // key_pages.size
        raise ValueError(
            f"the GPU kernel needs int8 pages of at most {2**31} elements, or more than {2**32}, "
            f"got {key_pages.size}: use {fitting} pages per call instead of {len(key_pages)}"
        )


def gpu_attention(
    q_OKRH: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    table_OC: jax.Array,
    length_O: jax.Array,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    first_OR: jax.Array | None = None,
    *,
    splits: int | None = None,
    interpret: bool = False,
) -> PartialAttention:
    """`decode_attention.partial_attention` on a GPU, with the same shapes [O, K, R, H].

    `splits` programs share an owner's tokens; None: chosen by the sizes.
    """
    check_gpu(q_OKRH, key_pages)
    owners, kv_heads, rows, head_dim = q_OKRH.shape
    width, slots = key_pages.shape[-1], table_OC.shape[1]
    dtype = dot_dtype(q_OKRH, key_pages)
    block = min(MAX_ROWS[dtype.name], max(MIN_ROWS, _power_of_two_from(rows)))
    row_blocks = -(-rows // block)
    # keys of one step are 16 KiB: more would spill registers in float32
    step = max(16, min(128, 16384 // (head_dim * dtype.itemsize)))
    if splits is None:
        wanted = _power_of_two_from(-(-TARGET_PROGRAMS // (owners * kv_heads * row_blocks)))
        splits = min(MAX_SPLITS, wanted, max(1, slots * width // step))
    padding = row_blocks * block - rows
    q = jnp.pad(q_OKRH.astype(dtype), ((0, 0), (0, 0), (0, padding), (0, 0)))
    scales = () if key_scale is None else (key_scale, value_scale)
    windows = ()
    if first_OR is not None:
        # a padding row starts after every token, so it adds no pages to read
        first = jnp.pad(first_OR, ((0, 0), (0, padding)), constant_values=2**30)
        begin = jnp.maximum(first.reshape(owners, row_blocks, block).min(-1), 0)
        windows = first, begin
    kernel = functools.partial(
        _kernel, block=block, step=step, width=width, splits=splits, windowed=bool(windows)
    )
    out, lse = pl.pallas_call(
        kernel,
        # owners first: the first dim of a grid is the one without the limit of 65,535
        grid=(owners, kv_heads, row_blocks * splits),
        out_shape=(
            jax.ShapeDtypeStruct((splits, *q.shape), jnp.float32),
            jax.ShapeDtypeStruct((splits, *q.shape[:-1]), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_decode_attention",
    )(q, length_O, table_OC, key_pages, value_pages, *windows, *scales)
    out, lse = merge_stacked(out, lse) if splits > 1 else (out[0], lse[0])
    return out[:, :, :rows], lse[:, :, :rows]


def _kernel(
    q_ref,
    length_ref,
    table_ref,
    key_ref,
    value_ref,
    *refs,
    block,
    step,
    width,
    splits,
    windowed,
):
    *refs, out_ref, lse_ref = refs
    first_ref, begin_ref, *scale_refs = refs if windowed else (None, None, *refs)
    key_scale_ref, value_scale_ref = scale_refs or (None, None)
    head_dim = q_ref.shape[-1]
    owner, head = pl.program_id(0), pl.program_id(1)
    row_block, split = pl.program_id(2) // splits, pl.program_id(2) % splits
    rows = pl.ds(row_block * block, block)
    length = length_ref[owner]
    q = q_ref[owner, head, rows, :]
    used = pl.cdiv(length, width)
    steps = pl.cdiv(length, step)
    first_seen = before = None
    if windowed:
        first_seen = first_ref[owner, rows]
        before = jax.lax.div(begin_ref[owner, row_block], step)  # steps that no row needs
    begin, stop = _share(split, splits, steps, before)
    within = jnp.arange(min(step, width), dtype=jnp.int32)  # tokens of one page in a step
    channel = jnp.arange(head_dim, dtype=jnp.int32)

    def body(index, carry):
        top, total, out = carry
        first = index * step
        # lax.div and lax.rem: with the sign handling of floor division, Triton cannot infer that
        # `first` is a multiple of `step`, and does not vectorize loads of neighbouring tokens
        slot, offset = jax.lax.div(first, width), jax.lax.rem(first, width)
        valid = first + jnp.arange(step, dtype=jnp.int32) < length
        if step <= width:
            at = _in_one_page(table_ref, owner, head, slot, offset, channel, within, valid)
        else:
            at = _in_whole_pages(table_ref, owner, head, slot, used, channel, within, valid)
        score = _scores(q, key_ref, key_scale_ref, at)
        sees = valid[None, :]
        if windowed:
            place = first + jnp.arange(step, dtype=jnp.int32)
            sees = sees & (place[None, :] >= first_seen[:, None])
        score = jnp.where(sees, score, LOWEST)
        new_top = jnp.maximum(top, score.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weight = jnp.exp2(score - new_top[:, None])
        if windowed:  # a row may have no key so far, so its top is LOWEST
            weight = jnp.where(sees, weight, 0.0)
        total = total * shrink + weight.sum(axis=1)
        update = _weighted_values(weight, value_ref, value_scale_ref, at, q.dtype)
        return new_top, total, out * shrink[:, None] + update

    start = (
        jnp.full((block,), LOWEST, jnp.float32),
        jnp.zeros((block,), jnp.float32),
        jnp.zeros((block, head_dim), jnp.float32),
    )
    # without windows every step has a key for all rows, so `top` is a score from the first step on
    top, total, out = jax.lax.fori_loop(begin, jnp.minimum(stop, steps), body, start)
    some = total > 0
    divisor = jnp.where(some, total, 1.0)
    out_ref[split, owner, head, rows, :] = out / divisor[:, None]
    lse = top * math.log(2) + jnp.log(divisor)
    lse_ref[split, owner, head, rows] = jnp.where(some, lse, -jnp.inf)


def _share(split, splits, steps, before):
    """First step of a split, and the step after its last; `before`: steps to skip, or None."""
    if before is None:
        share = pl.cdiv(steps, splits)
        return split * share, (split + 1) * share
    share = pl.cdiv(jnp.maximum(steps - before, 0), splits)
    return before + split * share, before + (split + 1) * share


class _Places(NamedTuple):
    """Indices of a step's tokens in the pages, and masks, as arguments of `_read`.

    Keys and scales of a page are read to its end, and tokens beyond the length are dropped
    afterwards: a mask by length would prevent Triton from vectorizing the loads. For values a mask
    by token costs nothing.
    """

    valid: jax.Array  # bool [T]: before the owner's length
    key: tuple
    value: tuple
    scale: tuple
    key_mask: jax.Array | None
    scale_mask: jax.Array | None
    value_mask: jax.Array


def _in_one_page(table_ref, owner, head, slot, offset, channel, within, valid) -> _Places:
    """Places of a step within one page, from `offset` on."""
    page = table_ref[owner, slot]
    token = pl.multiple_of(offset, len(valid)) + within
    return _Places(
        valid,
        key=(page, head, channel[:, None], token[None, :]),
        value=(page, head, token[:, None], channel[None, :]),
        scale=(page, head, token),
        key_mask=None,
        scale_mask=None,
        value_mask=valid[:, None],
    )


def _in_whole_pages(table_ref, owner, head, slot, used, channel, within, valid) -> _Places:
    """Places of a step of several whole pages; the owner has `used` pages."""
    pages, slots = len(valid) // len(within), table_ref.shape[1]
    slots_taken = slot + jnp.arange(pages, dtype=jnp.int32)
    # table entries beyond `used` are undefined and must not be loaded
    exists = slots_taken < used
    entry = table_ref.at[owner, jnp.minimum(slots_taken, slots - 1)]
    page = plgpu.load(entry, mask=exists, other=0)
    return _Places(
        valid,
        key=(page[None, :, None], head, channel[:, None, None], within[None, None, :]),
        value=(page[:, None, None], head, within[None, :, None], channel[None, None, :]),
        scale=(page[:, None], head, within[None, :]),
        key_mask=exists[None, :, None],
        scale_mask=exists[:, None],
        value_mask=valid.reshape(pages, len(within))[:, :, None],
    )


def _scores(q, key_ref, key_scale_ref, at: _Places):
    """Scores [rows, T] of a step to base 2: exp2 is one instruction, exp takes a product more."""
    step, head_dim = len(at.valid), q.shape[-1]
    scale = head_dim**-0.5 * math.log2(math.e)
    key = _read(key_ref, at.key, at.key_mask).reshape(head_dim, step)
    score = plgpu.dot(q, key.astype(q.dtype), precision=dot_precision(q.dtype)) * scale
    if key_scale_ref is not None:
        score *= _read(key_scale_ref, at.scale, at.scale_mask).reshape(1, step)
    return score


def _weighted_values(weight, value_ref, value_scale_ref, at: _Places, dtype):
    """Sum of a step's values weighted by weight [rows, T], multiplied in `dtype`: [rows, H]."""
    step, head_dim = len(at.valid), value_ref.shape[-1]
    if value_scale_ref is not None:
        value_scale = _read(value_scale_ref, at.scale, at.scale_mask)
        weight *= jnp.where(at.valid, value_scale.reshape(step), 0.0)[None, :]
    value = _read(value_ref, at.value, at.value_mask).reshape(step, head_dim)
    return plgpu.dot(weight.astype(dtype), value.astype(dtype), precision=dot_precision(dtype))


def _read(ref, index, mask):
    """Elements at `index` (scalars and arrays that broadcast), 0 where masked."""
    if mask is None:
        return ref[index]
    shape = jnp.broadcast_shapes(*[i.shape for i in index if i.ndim])
    return plgpu.load(
        ref.at[index], mask=jnp.broadcast_to(mask, shape), other=jnp.zeros((), ref.dtype)
    )


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _power_of_two_from(number: int) -> int:
    return 1 << (number - 1).bit_length()
