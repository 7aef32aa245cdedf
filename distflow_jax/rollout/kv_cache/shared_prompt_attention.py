"""Attention of the tokens being decoded over prompts that several slots answer.

D data ranks, S slots and P prompts of a rank, M members (slots) of a prompt at most, K key/value
heads, R query rows of one, H head dim, W tokens per page, B blocks of c pages that the longest
prompt has, T = c W tokens of a block.

A prompt's keys and values are read once for all slots that answer it, which for n samples divides
their memory and traffic by n, and makes two products of n rows what were 2 n of one (Hydragen:
Juravsky et al. 2024, arxiv.org/abs/2402.05099).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.attention import UNLIMITED
from distflow_jax.models.kernels.merge_partial import PartialAttention
from distflow_jax.rollout.kv_cache.pages import Cache, tables

NEVER = -1e30  # finite: the difference of two is 0, not NaN
_BLOCK_TOKENS = 128  # more would be wasted on short prompts, fewer on the loop

# rows q [D, S, K, R, H], layer, what they have seen -> that merged with attention over the cache.
# Of a model with a sliding window there is one argument more: the layer's, int32.
OverCache = Callable[..., PartialAttention]


class Contexts(NamedTuple):
    """The tokens in the cache that each slot attends to: its prompt's and its own."""

    own: jax.Array  # int32 [D, S]: tokens that each slot has of its own
    prompts: jax.Array  # int32 [D, P]: tokens of each prompt
    prompt: jax.Array  # int32 [D, S]: which of them each slot reads, out of range for none
    member: jax.Array  # int32 [D, S]: its number among the slots that read it

    def first_seen(
        self, window: jax.Array | int, rows: int, queries: int
    ) -> tuple[jax.Array, jax.Array]:
        """The first token of its prompt, and the first of its own, that each row sees within a
        window, int32 [D, S, R]: below 1 for all, and for none at or beyond the end.

        `rows` R are [..., Q], Q = `queries` new tokens of a slot.
        """
        number = self.prompts.shape[1]
        of_slot = jnp.take_along_axis(self.prompts, jnp.clip(self.prompt, 0, number - 1), axis=1)
        known = (self.prompt >= 0) & (self.prompt < number)
        nth = jnp.arange(rows, dtype=jnp.int32) % queries
        own = self.own[..., None] + nth[None, None] + 1 - window
        return jnp.where(known, of_slot, 0)[..., None] + own, own


class Groups(NamedTuple):
    """Prompts that slots answer, then any."""

    page: jax.Array  # int32 [D, P, B, c]: their pages in order, N where there is none
    slot: jax.Array  # int32 [D, P, M]: slots that read each; S: none
    length: jax.Array  # int32 [D, P]: tokens, 0 where no slot reads it
    count: jax.Array  # int32: how many there are, on the rank with the most


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


def groups_of(
    cache: Cache,
    length: jax.Array,
    prompt: jax.Array,
    member: jax.Array,
    members: int,
    longest: int,
) -> Groups:
    """Prompts of `length` int32 [D, P] tokens and at most `longest` pages, and slots that read
    them: `prompt`, `member` int32 [D, S] as `answering` takes them."""
    slots, number, ranks = prompt.shape[1], length.shape[1], length.shape[0]
    pages = min(max(1, _BLOCK_TOKENS // cache.key.shape[-1]), longest)
    blocks = -(-longest // pages)
    table = tables(cache, first=slots, count=number, longest=blocks * pages)
    slot = jax.vmap(lambda p, m: answering(p, m, number, members))(prompt, member)
    slot = slot.reshape(ranks, number, members)
    length = jnp.where((slot < slots).any(-1), length, 0)
    order = jnp.argsort(length == 0, axis=1, stable=True)
    count = (length > 0).sum(1, dtype=jnp.int32).max()
    table, slot, length = (jax.vmap(lambda x, at: x[at])(x, order) for x in (table, slot, length))
    return Groups(table.reshape(ranks, number, blocks, pages), slot, length, count)


def layer_pages(x: jax.Array, layer: jax.Array, page: jax.Array) -> jax.Array:
    """Pages `page` int32 [D, c] of one layer of x [layers, D, N, ...]: [D, c, ...]."""
    return jax.vmap(lambda x, at: x[layer, at], (1, 0))(x, page)


def over_prompts(
    q: jax.Array,
    cache: Cache,
    layer: jax.Array,
    groups: Groups,
    seen: PartialAttention,
    first: jax.Array | None = None,
) -> PartialAttention:
    """Rows q [D, S, K, R, H] of each slot over the prompt that it answers in one layer, merged with
    what they have `seen`: out float32 like q, and the log-sum-exp [D, S, K, R].

    `first` int32 [D, S, R]: the first token of the prompt that each row sees; None: all of it.
    Prompt after prompt, the rows of its members together; block after block of it with a running
    maximum (Milakov and Gimelshein 2018, arxiv.org/abs/1805.02867). Scales of int8 pages multiply
    scores and weights.
    """

    def of_group(index, part):
        page, slot, length = (
            jax.lax.dynamic_index_in_dim(x, index, 1, keepdims=False) for x in groups[:3]
        )
        rows = (_members(x, slot) for x in (q, *part))
        begin = None
        if first is not None:
            begin = _members(first[:, :, None], slot)[:, 0]
            # a prompt without readers is gathered from a slot that may read another one
            there = jnp.repeat(slot < first.shape[1], first.shape[2], axis=1)
            begin = jnp.where(there & (length > 0)[:, None], begin, UNLIMITED)
        new = _over_blocks(*rows, cache, layer, page, length, begin)
        return tuple(_to_slots(x, slot, of) for x, of in zip(part, new, strict=True))

    return jax.lax.fori_loop(0, groups.count, of_group, seen)


def _members(x: jax.Array, slot: jax.Array) -> jax.Array:
    """x [D, S, K, R, ...] of the slots `slot` int32 [D, M], as rows: [D, K, M R, ...]."""
    x = jax.vmap(lambda x, slot: x.at[slot].get(mode="clip"))(x, slot).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _to_slots(x: jax.Array, slot: jax.Array, rows: jax.Array) -> jax.Array:
    """x [D, S, K, R, ...] with `rows` [D, K, M R, ...] at the slots `slot` int32 [D, M]."""
    split = (*rows.shape[:2], slot.shape[1], -1, *rows.shape[3:])
    rows = rows.reshape(split).swapaxes(1, 2)
    return jax.vmap(lambda x, slot, rows: x.at[slot].set(rows, mode="drop"))(x, slot, rows)


def _over_blocks(
    q: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cache: Cache,
    layer: jax.Array,
    page: jax.Array,
    length: jax.Array,
    first: jax.Array | None,
) -> PartialAttention:
    """Rows q [D, K, X, H] over `length` int32 [D] tokens of the pages `page` int32 [D, B, c], from
    `first` int32 [D, X] on, merged with `out` float32 like q and `lse` [D, K, X]."""
    ranks, heads, _, head_dim = q.shape
    tokens = page.shape[2] * cache.key.shape[-1]
    scaled = cache.key_scale is not None

    def scales(x, at):
        return layer_pages(x, layer, at).swapaxes(1, 2).reshape(ranks, heads, 1, tokens)

    def block(index, part):
        before, lse = part
        at = jax.lax.dynamic_index_in_dim(page, index, 1, keepdims=False)
        k = layer_pages(cache.key, layer, at).transpose(0, 2, 3, 1, 4)
        k = k.reshape(ranks, heads, head_dim, tokens).astype(q.dtype)
        v = layer_pages(cache.value, layer, at).swapaxes(1, 2)
        v = v.reshape(ranks, heads, tokens, head_dim).astype(q.dtype)
        place = index * tokens + jnp.arange(tokens, dtype=jnp.int32)[None]
        valid = (place < length[:, None])[:, None, None]
        if not scaled:  # the page's last owner may have left nan there, and 0 * nan is nan
            v = jnp.where(valid.swapaxes(2, 3), v, 0)
        if first is not None:
            valid = valid & (place[:, None] >= first[..., None])[:, None]
        logits = jnp.einsum("DKXH,DKHT->DKXT", q, k).astype(jnp.float32) * head_dim**-0.5
        if scaled:
            logits = logits * scales(cache.key_scale, at)
        logits = jnp.where(valid, logits, NEVER)
        top = jnp.maximum(lse, logits.max(-1))
        weight = jnp.where(valid, jnp.exp(logits - top[..., None]), 0.0)
        by_value = weight
        if scaled:
            by_value = jnp.where(valid, weight * scales(cache.value_scale, at), 0.0)
        out = jnp.einsum("DKXT,DKTH->DKXH", by_value.astype(q.dtype), v).astype(jnp.float32)
        shrink = jnp.exp(lse - top)
        total = shrink + weight.sum(-1)
        none = total == 0.0
        total = jnp.where(none, 1.0, total)
        out = (before * shrink[..., None] + out) / total[..., None]
        return out, jnp.where(none, -jnp.inf, top + jnp.log(total))

    blocks = (length.max() + tokens - 1) // tokens
    start = 0 if first is None else jnp.maximum(first.min(), 0) // tokens
    return jax.lax.fori_loop(start, blocks, block, (out, lse))
