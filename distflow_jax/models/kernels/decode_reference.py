"""Decode attention over KV pages in plain jax.numpy: reference of the kernels, and CPU backend.

O owners, K key/value heads, R query rows per key/value head, H head dim, N pages of W tokens,
C table entries per owner.
"""

import jax
import jax.numpy as jnp

from distflow_jax.models.kernels.merge_partial import PartialAttention

LOWEST = -1e30  # finite, so that no difference of two scores is nan


def dot_dtype(q: jax.Array, pages: jax.Array) -> jnp.dtype:
    """Dtype of the products of q [O, K, R, H] and pages [N, K, H, W].

    The dtype of the pages, for int8 pages that of the queries.
    """
    return jnp.dtype(q.dtype if pages.dtype == jnp.int8 else pages.dtype)


def dot_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Precision of products in `dtype`: full for float32, for which the default is lower.

    The default is TF32 on GPUs and bfloat16 passes on TPUs.
    """
    exact = dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def reference_attention(
    q_OKRH: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    table_OC: jax.Array,
    length_O: jax.Array,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    first_OR: jax.Array | None = None,
) -> PartialAttention:
    """`decode_attention.partial_attention` by a loop over page indices, a page per owner at a time.

    Shapes are those of partial_attention, with q [O, K, R, H]. The loop runs from the first page
    that any query row attends to up to the longest length, so the cost depends on these and not on
    C. Owners past their length read page 0 and discard it.
    """
    owners, kv_heads, rows, head_dim = q_OKRH.shape
    width = key_pages.shape[-1]
    dtype = dot_dtype(q_OKRH, key_pages)
    precision = dot_precision(dtype)
    q = q_OKRH.astype(dtype)
    used_O = -(-length_O // width)

    def page(slot, carry):
        top, total, out = carry
        index = jnp.where(slot < used_O, table_OC[:, slot], 0)
        position = slot * width + jnp.arange(width, dtype=jnp.int32)
        valid = (position[None] < length_O[:, None])[:, None, None]
        sees = valid
        if first_OR is not None:
            sees = valid & (position[None, None] >= first_OR[..., None])[:, None]
        key = key_pages[index].astype(dtype)
        # pages may hold nan beyond an owner's length, and 0 * nan is nan
        value = jnp.where(valid[:, 0, :, :, None], value_pages[index], 0).astype(dtype)
        score = jnp.einsum(
            "OKRH,OKHW->OKRW", q, key, precision=precision, preferred_element_type=jnp.float32
        )
        if key_scale is not None:
            score = score * key_scale[index][:, :, None]
        score = jnp.where(sees, score * head_dim**-0.5, LOWEST)
        new_top = jnp.maximum(top, score.max(-1))
        shrink = jnp.exp(top - new_top)
        weight = jnp.where(sees, jnp.exp(score - new_top[..., None]), 0.0)
        total = total * shrink + weight.sum(-1)
        if value_scale is not None:
            weight = weight * jnp.where(valid, value_scale[index][:, :, None], 0.0)
        update = jnp.einsum(
            "OKRW,OKWH->OKRH",
            weight.astype(dtype),
            value,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return new_top, total, out * shrink[..., None] + update

    start = (
        jnp.full((owners, kv_heads, rows), LOWEST, jnp.float32),
        jnp.zeros((owners, kv_heads, rows), jnp.float32),
        jnp.zeros((owners, kv_heads, rows, head_dim), jnp.float32),
    )
    begin = 0 if first_OR is None else jnp.maximum(first_OR.min(), 0) // width
    top, total, out = jax.lax.fori_loop(begin, used_O.max(), page, start)
    lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
    return out / jnp.where(total > 0, total, 1.0)[..., None], lse
