"""Attention of the tokens being decoded over the pages of slots and of prompts.

D data ranks, S slots and P prompts of a rank, N pages of a rank, c of them read at a time, Q new
tokens of a slot, K key/value heads, G query heads of one, R = G Q query rows of one, H head dim, W
tokens per page.

A slot attends to its new tokens up to itself, to its prompt, and to what its response has so far;
the three are merged by their log-sum-exp. Shared prompts: shared_prompt_attention.py. In layers
with a window, pages that lie before it are not read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.attention import UNLIMITED, within
from distflow_jax.models.kernels.merge_partial import PartialAttention
from distflow_jax.rollout.kv_cache.pages import Cache
from distflow_jax.rollout.kv_cache.shared_prompt_attention import (
    NEVER,
    Contexts,
    OverCache,
    answering,
    groups_of,
    layer_pages,
    over_prompts,
)


class Readers(NamedTuple):
    """Pages that are read, each by one slot."""

    page: jax.Array  # int32 [D, N]: those that are read, in their order, then any
    slot: jax.Array  # int32 [D, N]: the slot that reads each of these; S: none
    count: jax.Array  # int32 [D, N]: tokens of it that count, 0 where no slot reads it
    chunk: int  # pages that are read at a time
    chunks: jax.Array  # int32: how often, on the rank with the most
    # int32 [D, N]: place of its first token among those of its owner, where layers have windows
    start: jax.Array | None


def slot_readers(cache: Cache, length: jax.Array, first: jax.Array | None = None) -> Readers:
    """Slots and their own pages, the lowest. `length` int32 [D, S]: tokens of their own; `first`
    int32 [D, S]: from which of them on they read."""
    slots = length.shape[1]
    owner = cache.owner
    return _readers(cache, jnp.minimum(owner, slots), owner, length, slots, first)


def prompt_readers(
    cache: Cache, length: jax.Array, prompt: jax.Array, first: jax.Array | None = None
) -> Readers:
    """Slots and the pages of their prompts, the highest, where no two slots share one: `length`
    int32 [D, P] tokens, `prompt` int32 [D, S] as `answering` takes it; `first` int32 [D, S]: from
    which token of its prompt on each slot reads."""
    slots, number = prompt.shape[1], length.shape[1]
    reader = jax.vmap(lambda p: answering(p, jnp.zeros_like(p), number, 1))(prompt)
    of_prompt = cache.owner - slots
    known = (of_prompt >= 0) & (of_prompt < number)
    slot = jnp.take_along_axis(reader, jnp.clip(of_prompt, 0, number - 1), axis=1)
    return _readers(cache, jnp.where(known, slot, slots), of_prompt, length, slots, first)


def _readers(
    cache: Cache,
    slot: jax.Array,
    owner: jax.Array,
    length: jax.Array,
    slots: int,
    first: jax.Array | None,
) -> Readers:
    pages, width = cache.owner.shape[1], cache.key.shape[-1]
    # as many pages at a time as there are slots: young responses have one each
    most = min(pages, max(8, min(32, slots)))
    chunk = next(c for c in range(most, 0, -1) if pages % c == 0)
    mine = (owner >= 0) & (owner < length.shape[1]) & (slot < slots)
    of_owner = jnp.take_along_axis(length, jnp.clip(owner, 0, length.shape[1] - 1), axis=1)
    count = jnp.where(mine, jnp.clip(of_owner - cache.rank * width, 0, width), 0)
    if first is not None:
        start = cache.rank * width
        of_reader = jnp.take_along_axis(first, jnp.minimum(slot, slots - 1), axis=1)
        count = jnp.where(start + width > of_reader, count, 0)
    used = count > 0
    order = jnp.argsort(~used, axis=1, stable=True).astype(jnp.int32)
    number = used.sum(1, dtype=jnp.int32).max()
    return Readers(
        order,
        jnp.take_along_axis(slot, order, axis=1),
        jnp.take_along_axis(count, order, axis=1),
        chunk,
        (number + chunk - 1) // chunk,
        None if first is None else jnp.take_along_axis(start, order, axis=1),
    )


def over_pages(
    q: jax.Array,
    cache: Cache,
    layer: jax.Array,
    readers: Readers,
    seen: PartialAttention,
    first: jax.Array | None = None,
) -> PartialAttention:
    """Rows q [D, S, K, R, H] of each slot over the pages that it reads in one layer, merged with
    what they have `seen`: out float32 like q, and the log-sum-exp [D, S, K, R].

    `first` int32 [D, S, R]: of the pages' owner's tokens the first that each row sees; None: all.
    Pages are read as they lie, queries are brought to them, and what each page gives is added up by
    slot with a product: sorting keys and values by slot would cost more than using them. Scales of
    int8 pages multiply scores and weights: keys and values themselves are only converted.
    """
    ranks, slots, _, _, head_dim = q.shape
    width, chunk = cache.key.shape[-1], readers.chunk
    scale = head_dim**-0.5
    scaled = cache.key_scale is not None

    def step(index, part):
        before, lse = part
        start = index * chunk

        def of_step(x):
            return jax.lax.dynamic_slice(x, (0, start), (ranks, chunk))

        page, slot, count = map(of_step, (readers.page, readers.slot, readers.count))
        k, v = (layer_pages(x, layer, page) for x in (cache.key, cache.value))
        if scaled:
            k, v = (x.astype(q.dtype) for x in (k, v))
        mine = slot[:, None] == jnp.arange(slots, dtype=jnp.int32)[None, :, None]
        who = jnp.minimum(slot, slots - 1)
        nth = jnp.arange(width, dtype=jnp.int32)[None, None]
        valid = (nth < count[..., None])[:, :, None, None]  # [D, c, 1, 1, W]
        if not scaled:  # the page's last owner may have left nan there, and 0 * nan is nan
            v = jnp.where(valid.swapaxes(3, 4), v, 0)

        def to_pages(x):  # [D, S, ...] -> [D, c, ...]
            return jax.vmap(lambda x, who: x[who])(x, who)

        if first is not None:  # [D, c, 1, R, W]
            place = of_step(readers.start)[..., None] + nth
            is_near = place[:, :, None] >= to_pages(first)[..., None]
            valid = valid & is_near[:, :, None]
        logits = jnp.einsum("DCKRH,DCKHW->DCKRW", to_pages(q), k).astype(jnp.float32) * scale
        if scaled:
            logits = logits * layer_pages(cache.key_scale, layer, page)[:, :, :, None]
        logits = jnp.where(valid, logits, NEVER)
        top = jnp.where(mine[..., None, None], logits.max(-1)[:, None], NEVER).max(2)
        top = jnp.maximum(lse, top)
        weight = jnp.where(valid, jnp.exp(logits - to_pages(top)[..., None]), 0.0)
        by_value = weight
        if scaled:
            by_value = weight * layer_pages(cache.value_scale, layer, page)[:, :, :, None]
            by_value = jnp.where(valid, by_value, 0.0)
        out = jnp.einsum("DCKRW,DCKWH->DCKRH", by_value.astype(v.dtype), v).astype(jnp.float32)
        add = mine.astype(jnp.float32)
        # divided here, not after the loop: a product that follows would divide in its midst
        shrink = jnp.exp(lse - top)
        total = shrink + jnp.einsum("DSC,DCKR->DSKR", add, weight.sum(-1))
        none = total == 0.0
        total = jnp.where(none, 1.0, total)
        out = before * shrink[..., None] + jnp.einsum("DSC,DCKRH->DSKRH", add, out)
        return out / total[..., None], jnp.where(none, -jnp.inf, top + jnp.log(total))

    return jax.lax.fori_loop(0, readers.chunks, step, seen)


def over_cache(
    cache: Cache,
    contexts: Contexts,
    *,
    members: int,
    longest: int,
    sliding_window: int = 0,
    queries: int = 1,
) -> OverCache:
    """Attention over slots' own pages and those of their prompts, at most `longest` of a prompt.

    At most `members` slots read one prompt. With a `sliding_window` the result takes a layer's
    window too, for Q = `queries` new tokens of a slot.
    """
    own, prompts, prompt, member = contexts

    def readers(window):  # of slots' own pages, and of prompts that no two slots share
        of_prompt = of_own = None
        if window is not None:
            of_prompt, of_own = contexts.first_seen(window, 1, queries)
        of_prompt, of_own = jax.tree.map(lambda x: x[..., 0], (of_prompt, of_own))
        mine = slot_readers(cache, own, of_own)
        if members > 1:
            return mine, None
        return mine, prompt_readers(cache, prompts, prompt, of_prompt)

    every = readers(UNLIMITED if sliding_window else None)
    if sliding_window:
        near = readers(sliding_window)
    if members > 1:
        groups = groups_of(cache, prompts, prompt, member, members, longest)

    def attend(q, layer, seen, window=None):
        (mine, alone), of_prompt, of_own = every, None, None
        if window is not None:
            of_prompt, of_own = contexts.first_seen(window, q.shape[3], queries)
            mine, alone = either(window < UNLIMITED, near, every)
        if members == 1:
            seen = over_pages(q, cache, layer, alone, seen, of_prompt)
        else:
            seen = over_prompts(q, cache, layer, groups, seen, of_prompt)
        return over_pages(q, cache, layer, mine, seen, of_own)

    return attend


_Pair = tuple[Readers, Readers | None]


def either(condition: jax.Array, near: _Pair, every: _Pair) -> _Pair:
    """`near` where `condition`, a bool scalar, holds, else `every`: readers of the same pages."""

    def chosen(one, other):
        if one is None or other is None:
            return None
        arrays = {
            name: jnp.where(condition, getattr(one, name), getattr(other, name))
            for name in ("page", "slot", "count", "chunks", "start")
        }
        return other._replace(**arrays)

    return tuple(map(chosen, near, every))


def over_new(
    q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array | None = None
) -> PartialAttention:
    """New tokens over themselves: q [D, S, K, G, Q, H], k and v [D, S, Q, K, H], causal and, where
    one is given, within a `window` int32."""
    queries = q.shape[4]
    logits = jnp.einsum("DSKGQH,DSTKH->DSKGQT", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((queries, queries), bool))
    if window is not None:
        nth = jnp.arange(queries, dtype=jnp.int32)[None]
        causal &= within(nth, nth, window)[0]
    logits = jnp.where(causal[None, None, None, None], logits, NEVER)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weight = jnp.exp(logits - lse[..., None])
    return jnp.einsum("DSKGQT,DSTKH->DSKGQH", weight.astype(v.dtype), v).astype(jnp.float32), lse


def slot_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    over: OverCache,
    window: jax.Array | None = None,
) -> jax.Array:
    """Attention of new tokens over themselves and the cache: q [D, S, Q, N, H], k and v
    [D, S, Q, K, H]; the same shape as q. `window` int32: the layer's, of a model that has some."""
    ranks, slots, queries, heads, head_dim = q.shape
    kv_heads = k.shape[3]
    rows = q.reshape(ranks, slots, queries, kv_heads, heads // kv_heads, head_dim)
    rows = rows.transpose(0, 1, 3, 4, 2, 5)  # [D, S, K, G, Q, H]
    flat = rows.reshape(ranks, slots, kv_heads, -1, head_dim)
    new, lse = over_new(rows, k, v, window)
    seen = new.reshape(flat.shape), lse.reshape(flat.shape[:-1])
    out, _ = over(flat, layer, seen, *([] if window is None else [window]))
    out = out.astype(q.dtype).reshape(ranks, slots, kv_heads, heads // kv_heads, queries, head_dim)
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(q.shape)
