"""Attention of the tokens being decoded over the pages of slots and of prompts.

D data ranks, S slots and P prompts of a rank, M members (slots) of a prompt at most, Q new tokens
of a slot, K key/value heads, G query heads of one, R query rows of one, H head dim, W tokens per
page.

A slot attends to its prompt, to what its response has so far, and to its new tokens up to itself;
the three are merged by their log-sum-exp. A prompt's keys and values are read once for all slots
that answer it, which for n samples divides their memory and traffic by n (Hydragen: Juravsky et al.
2024, arxiv.org/abs/2402.05099).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.kernels.merge import Part, merge
from distflow_jax.rollout.cache import Cache

_NEVER = -1e30  # finite: the difference of two is 0, not NaN


class Group(NamedTuple):
    """Owners of one kind and their pages, [first_page, end_page) of each rank in whole chunks."""

    first: int  # owner id of the first
    length: jax.Array  # int32 [D, O]: tokens of each that count
    chunk: int  # pages that are read at a time
    chunks: tuple[jax.Array, jax.Array]  # first chunk of pages and the one after the last


def slots_of(cache: Cache, length: jax.Array) -> Group:
    """Slots and their pages, the lowest. `length` int32 [D, S]: tokens of their own."""
    slots = length.shape[1]
    # as many pages as there are slots: young responses have one each
    return _group(cache, 0, length, cache.owner < slots, most=max(8, min(32, slots)))


def prompts_of(cache: Cache, length: jax.Array, slots: int, members: int) -> Group:
    """Prompts and their pages, the highest. `length` int32 [D, P]: tokens; `members`: as many slots
    answer one at most."""
    owners = slots + length.shape[1]
    used = (cache.owner >= slots) & (cache.owner < owners)
    # where a page has rows of many slots, few pages are enough for a product to be worth its start
    return _group(cache, slots, length, used, most=max(8, min(32, slots // members)))


def _group(cache: Cache, first: int, length: jax.Array, used: jax.Array, most: int) -> Group:
    pages = used.shape[1]
    chunk = next(c for c in range(min(most, pages), 0, -1) if pages % c == 0)
    page = jnp.arange(pages, dtype=jnp.int32)
    end = jnp.max(jnp.where(used, page[None] + 1, 0))
    start = jnp.min(jnp.where(used, page[None], pages))
    return Group(first, length, chunk, (start // chunk, (end + chunk - 1) // chunk))


def over_pages(
    q: jax.Array, cache: Cache, layer: jax.Array, group: Group, seen: Part | None = None
) -> Part:
    """Rows q [D, O, K, R, H] of each owner over its pages in one layer, merged with what they have
    `seen`: out float32 like q, and the log-sum-exp [D, O, K, R].

    Pages are read where they lie, queries are brought to them, and what each page gives is added up
    by owner with a product: moving keys and values would cost more than using them.
    """
    ranks, owners, heads, rows, head_dim = q.shape
    width, chunk = cache.key.shape[-1], group.chunk
    scale = head_dim**-0.5

    def step(index, part):
        before, lse = part
        start = index * chunk
        at = (layer, 0, start, 0, 0, 0)
        k = jax.lax.dynamic_slice(cache.key, at, (1, ranks, chunk, *cache.key.shape[3:]))[0]
        v = jax.lax.dynamic_slice(cache.value, at, (1, ranks, chunk, *cache.value.shape[3:]))[0]
        owner = jax.lax.dynamic_slice(cache.owner, (0, start), (ranks, chunk)) - group.first
        rank = jax.lax.dynamic_slice(cache.rank, (0, start), (ranks, chunk))
        mine = owner[:, None] == jnp.arange(owners, dtype=jnp.int32)[None, :, None]  # [D, O, c]
        who = jnp.clip(owner, 0, owners - 1)
        length = jnp.where(mine.any(1), jnp.take_along_axis(group.length, who, axis=1), 0)
        position = rank[..., None] * width + jnp.arange(width, dtype=jnp.int32)[None, None]
        valid = (position < length[..., None])[:, :, None, None]  # [D, c, 1, 1, W]

        queries = jax.vmap(lambda q, who: q[who])(q, who)
        logits = jnp.einsum("DCKRH,DCKHW->DCKRW", queries, k).astype(jnp.float32) * scale
        logits = jnp.where(valid, logits, _NEVER)
        hot = mine[..., None, None]
        top = jnp.max(jnp.where(hot, logits.max(-1)[:, None], _NEVER), axis=2)
        top = jnp.maximum(lse, top)
        theirs = jax.vmap(lambda t, who: t[who])(top, who)
        weight = jnp.where(valid, jnp.exp(logits - theirs[..., None]), 0.0)
        out = jnp.einsum("DCKRW,DCKWH->DCKRH", weight.astype(v.dtype), v).astype(jnp.float32)
        add = mine.astype(jnp.float32)
        # divided here, not after the loop: a product that follows would divide in its midst
        shrink = jnp.exp(lse - top)
        total = shrink + jnp.einsum("DOC,DCKR->DOKR", add, weight.sum(-1))
        none = total == 0.0
        total = jnp.where(none, 1.0, total)
        out = before * shrink[..., None] + jnp.einsum("DOC,DCKRH->DOKRH", add, out)
        return out / total[..., None], jnp.where(none, -jnp.inf, top + jnp.log(total))

    if seen is None:
        nothing = jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)
        seen = jnp.zeros(q.shape, jnp.float32), nothing
    return jax.lax.fori_loop(*group.chunks, step, seen)


def over_new(q: jax.Array, k: jax.Array, v: jax.Array) -> Part:
    """New tokens over themselves: q [D, S, K, G, Q, H], k and v [D, S, Q, K, H], causal."""
    queries = q.shape[4]
    logits = jnp.einsum("DSKGQH,DSTKH->DSKGQT", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((queries, queries), bool))
    logits = jnp.where(causal[None, None, None, None], logits, _NEVER)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weight = jnp.exp(logits - lse[..., None])
    return jnp.einsum("DSKGQT,DSTKH->DSKGQH", weight.astype(v.dtype), v).astype(jnp.float32), lse


# rows q [D, O, K, R, H] of a kind of owners, layer, and what the rows have seen: merged with that,
# their attention over their pages
OverPages = Callable[..., Part]


def slot_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    *,
    over_own: OverPages,
    over_prompts: OverPages,
    prompt: jax.Array,
    member: jax.Array,
    number: int,
    members: int,
) -> jax.Array:
    """Attention of new tokens, q [D, S, Q, N, H], k and v [D, S, Q, K, H]; the same shape as q.

    `prompt` int32 [D, S]: which of the `number` prompts each slot answers, out of range for none;
    `member` int32 [D, S]: its number among those that answer it, below `members`.
    """
    ranks, slots, queries, heads, head_dim = q.shape
    kv_heads = k.shape[3]
    rows = q.reshape(ranks, slots, queries, kv_heads, heads // kv_heads, head_dim)
    rows = rows.transpose(0, 1, 3, 4, 2, 5)  # [D, S, K, G, Q, H]
    flat = rows.reshape(ranks, slots, kv_heads, -1, head_dim)

    place = jnp.where((prompt >= 0) & (prompt < number), prompt * members + member, -1)
    place = jnp.where(place < 0, number * members, place)

    def to_prompts(flat, place):  # [S, K, R, H] -> [P, K, M R, H]
        table = jnp.full(number * members, slots, jnp.int32)
        table = table.at[place].set(jnp.arange(slots, dtype=jnp.int32), mode="drop")
        padded = flat.at[table].get(mode="fill", fill_value=0)
        padded = padded.reshape(number, members, kv_heads, -1, head_dim)
        return padded.swapaxes(1, 2).reshape(number, kv_heads, -1, head_dim)

    def to_slots(x, place):  # [P, K, M R, ...] -> [S, K, R, ...]
        x = x.reshape(number, kv_heads, members, -1, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(number * members, *x.shape[2:])[jnp.minimum(place, number * members - 1)]

    shared = over_prompts(jax.vmap(to_prompts)(flat, place), layer)
    shared, lse = (jax.vmap(to_slots)(x, place) for x in shared)
    known = (place < number * members)[..., None, None]
    new = (x.reshape(y.shape) for x, y in zip(over_new(rows, k, v), (shared, lse), strict=True))
    seen = merge(((shared, jnp.where(known, lse, -jnp.inf)), tuple(new)))
    out = over_own(flat, layer, seen)[0].astype(q.dtype)
    out = out.reshape(ranks, slots, kv_heads, heads // kv_heads, queries, head_dim)
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(q.shape)
