"""Attention of the tokens being decoded over the pages of slots and of prompts.

D data ranks, S slots and P prompts of a rank, N pages of a rank, M members (slots) of a prompt at
most, Q new tokens of a slot, K key/value heads, G query heads of one, R = G Q query rows of one, H
head dim, W tokens per page.

A slot attends to its new tokens up to itself, to its prompt, and to what its response has so far;
the three are merged by their log-sum-exp. A prompt's keys and values are read once for all slots
that answer it, which for n samples divides their memory and traffic by n (Hydragen: Juravsky et al.
2024, arxiv.org/abs/2402.05099).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.kernels.merge import Part
from distflow_jax.rollout.cache import Cache

_NEVER = -1e30  # finite: the difference of two is 0, not NaN

# rows q [D, S, K, R, H], layer, what they have seen -> that merged with attention over the cache
OverCache = Callable[[jax.Array, jax.Array, Part], Part]


class Readers(NamedTuple):
    """The pages of one kind of owners that are read, and which slots read each."""

    page: jax.Array  # int32 [D, N]: those that are read, in their order, then any
    slot: jax.Array  # int32 [D, N, m]: of each of these; S: none
    count: jax.Array  # int32 [D, N]: tokens of it that count, 0 where nobody reads it
    chunk: int  # pages that are read at a time
    chunks: jax.Array  # int32: how often, on the rank with the most


def slot_readers(cache: Cache, length: jax.Array) -> Readers:
    """Slots and their own pages, the lowest. `length` int32 [D, S]: tokens of their own."""
    slots = length.shape[1]
    # as many pages as there are slots: young responses have one each
    most = max(8, min(32, slots))
    return _readers(cache, jnp.minimum(cache.owner, slots)[..., None], cache.owner, length, most)


def prompt_readers(
    cache: Cache, length: jax.Array, prompt: jax.Array, member: jax.Array, members: int
) -> Readers:
    """Prompts' pages, the highest. `length` int32 [D, P]: tokens; `prompt` and `member`: see
    `answering`."""
    slots, number = prompt.shape[1], length.shape[1]
    table = jax.vmap(lambda p, m: answering(p, m, number, members))(prompt, member)
    of_prompt = cache.owner - slots
    known = (of_prompt >= 0) & (of_prompt < number)
    here = jnp.clip(of_prompt, 0, number - 1)
    slot = jax.vmap(lambda table, here: table[here])(table.reshape(-1, number, members), here)
    # where a page has rows of many slots, few pages are enough for a product to be worth its start
    most = max(8, min(32, slots // members))
    return _readers(cache, jnp.where(known[..., None], slot, slots), of_prompt, length, most)


def answering(prompt: jax.Array, member: jax.Array, number: int, members: int) -> jax.Array:
    """Slots that answer each prompt, int32 [number * members], S for none.

    `prompt` int32 [S]: which of the `number` prompts each slot answers, out of range for none;
    `member` int32 [S]: its number among those that answer it, below `members`.
    """
    slots = prompt.shape[0]
    place = jnp.where((prompt >= 0) & (prompt < number), prompt * members + member, -1)
    place = jnp.where(place < 0, number * members, place)
    table = jnp.full(number * members, slots, jnp.int32)
    return table.at[place].set(jnp.arange(slots, dtype=jnp.int32), mode="drop")


def _readers(
    cache: Cache, slot: jax.Array, owner: jax.Array, length: jax.Array, most: int
) -> Readers:
    pages, width = cache.owner.shape[1], cache.key.shape[-1]
    chunk = next(c for c in range(min(most, pages), 0, -1) if pages % c == 0)
    mine = (owner >= 0) & (owner < length.shape[1])
    of_owner = jnp.take_along_axis(length, jnp.clip(owner, 0, length.shape[1] - 1), axis=1)
    count = jnp.where(mine, jnp.clip(of_owner - cache.rank * width, 0, width), 0)
    used = count > 0
    order = jnp.argsort(~used, axis=1, stable=True).astype(jnp.int32)
    number = used.sum(1, dtype=jnp.int32).max()
    return Readers(
        order,
        jnp.take_along_axis(slot, order[..., None], axis=1),
        jnp.take_along_axis(count, order, axis=1),
        chunk,
        (number + chunk - 1) // chunk,
    )


def over_pages(q: jax.Array, cache: Cache, layer: jax.Array, readers: Readers, seen: Part) -> Part:
    """Rows q [D, S, K, R, H] of each slot over the pages that it reads in one layer, merged with
    what they have `seen`: out float32 like q, and the log-sum-exp [D, S, K, R].

    Pages are read as they lie, queries are brought to them, and what each page gives is added up by
    slot with a product: sorting keys and values by slot would cost more than using them. Scales of
    int8 pages multiply scores and weights: keys and values themselves are only converted.
    """
    ranks, slots, heads, rows, head_dim = q.shape
    width, chunk, members = cache.key.shape[-1], readers.chunk, readers.slot.shape[-1]
    scale = head_dim**-0.5
    scaled = cache.key_scale is not None
    by_reader = (ranks, chunk, heads, members, rows)

    def step(index, part):
        before, lse = part
        start = index * chunk
        page = jax.lax.dynamic_slice(readers.page, (0, start), (ranks, chunk))

        def of_chunk(pages):
            return jax.vmap(lambda x, at: x[layer, at], (1, 0))(pages, page)

        k, v = (of_chunk(x) for x in (cache.key, cache.value))
        if scaled:
            k, v = (x.astype(q.dtype) for x in (k, v))
        slot = jax.lax.dynamic_slice(readers.slot, (0, start, 0), (ranks, chunk, members))
        count = jax.lax.dynamic_slice(readers.count, (0, start), (ranks, chunk))
        mine = slot[:, None] == jnp.arange(slots, dtype=jnp.int32)[None, :, None, None]
        who = jnp.minimum(slot, slots - 1)
        within = jnp.arange(width, dtype=jnp.int32)[None, None] < count[..., None]
        if not scaled:  # a page that was somebody else's may hold nan there, and 0 * nan is nan
            v = jnp.where(within[:, :, None, :, None], v, 0)
        read = (slot < slots)[..., None] & within[:, :, None]
        valid = read[:, :, None, :, None]  # [D, c, 1, m, 1, W]

        def to_readers(x):  # [D, S, K, ...] -> [D, c, K, m, ...]
            return jax.vmap(lambda x, who: x[who])(x, who).swapaxes(2, 3)

        queries = to_readers(q).reshape(*by_reader[:3], -1, head_dim)
        logits = jnp.einsum("DCKXH,DCKHW->DCKXW", queries, k).astype(jnp.float32) * scale
        logits = logits.reshape(*by_reader, width)
        if scaled:
            logits = logits * of_chunk(cache.key_scale)[:, :, :, None, None]
        logits = jnp.where(valid, logits, _NEVER)
        top = logits.max(-1).swapaxes(2, 3)[:, None]  # [D, 1, c, m, K, R]
        top = jnp.max(jnp.where(mine[..., None, None], top, _NEVER), axis=(2, 3))
        top = jnp.maximum(lse, top)
        weight = jnp.where(valid, jnp.exp(logits - to_readers(top)[..., None]), 0.0)
        by_value = weight
        if scaled:
            by_value = weight * of_chunk(cache.value_scale)[:, :, :, None, None]
            by_value = jnp.where(valid, by_value, 0.0)
        by_value = by_value.reshape(*by_reader[:3], -1, width).astype(v.dtype)
        out = jnp.einsum("DCKXW,DCKWH->DCKXH", by_value, v)
        out = out.astype(jnp.float32).reshape(*by_reader, head_dim)
        add = mine.astype(jnp.float32)
        # divided here, not after the loop: a product that follows would divide in its midst
        shrink = jnp.exp(lse - top)
        total = shrink + jnp.einsum("DSCM,DCKMR->DSKR", add, weight.sum(-1))
        none = total == 0.0
        total = jnp.where(none, 1.0, total)
        out = before * shrink[..., None] + jnp.einsum("DSCM,DCKMRH->DSKRH", add, out)
        return out / total[..., None], jnp.where(none, -jnp.inf, top + jnp.log(total))

    return jax.lax.fori_loop(0, readers.chunks, step, seen)


def over_cache(cache: Cache, kinds: Sequence[Readers]) -> OverCache:
    """Attention over the pages of several kinds of owners, one after the other."""

    def attend(q, layer, seen):
        for readers in kinds:
            seen = over_pages(q, cache, layer, readers, seen)
        return seen

    return attend


def over_new(q: jax.Array, k: jax.Array, v: jax.Array) -> Part:
    """New tokens over themselves: q [D, S, K, G, Q, H], k and v [D, S, Q, K, H], causal."""
    queries = q.shape[4]
    logits = jnp.einsum("DSKGQH,DSTKH->DSKGQT", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((queries, queries), bool))
    logits = jnp.where(causal[None, None, None, None], logits, _NEVER)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weight = jnp.exp(logits - lse[..., None])
    return jnp.einsum("DSKGQT,DSTKH->DSKGQH", weight.astype(v.dtype), v).astype(jnp.float32), lse


def slot_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, over: OverCache
) -> jax.Array:
    """Attention of new tokens over themselves and the cache: q [D, S, Q, N, H], k and v
    [D, S, Q, K, H]; the same shape as q."""
    ranks, slots, queries, heads, head_dim = q.shape
    kv_heads = k.shape[3]
    rows = q.reshape(ranks, slots, queries, kv_heads, heads // kv_heads, head_dim)
    rows = rows.transpose(0, 1, 3, 4, 2, 5)  # [D, S, K, G, Q, H]
    flat = rows.reshape(ranks, slots, kv_heads, -1, head_dim)
    new, lse = over_new(rows, k, v)
    out, _ = over(flat, layer, (new.reshape(flat.shape), lse.reshape(flat.shape[:-1])))
    out = out.astype(q.dtype).reshape(ranks, slots, kv_heads, heads // kv_heads, queries, head_dim)
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(q.shape)
