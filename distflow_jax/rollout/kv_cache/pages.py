"""The sampler's key/value cache: pages of tokens, handed out as responses grow.

D data ranks, S slots and P prompts of a rank, N pages of a rank, K key/value heads, H head dim, W
tokens per page, C pages of the longest owner, X experts of a token.

As int8, a token's key is int8 [H] times a float32 of its own in each layer and head, and so is its
value: what is near is not made coarse by a token that is far larger.

Pages have owners: a slot, for what its response adds, or a prompt, kept once for all slots that
answer it. Slots take the lowest free pages and prompts the highest, so that attention can walk
through the pages as they lie, from 0 and from N, and its cost follows what is used. The
pages of an owner that has ended are freed when new ones are taken.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.int8 import quantise
from distflow_jax.models.moe import recorded_dtype

KEY_AXES = ("layers", "batch", "blocks", "kv_heads", "head_dim", "length")
VALUE_AXES = ("layers", "batch", "blocks", "kv_heads", "length", "head_dim")
SCALE_AXES = ("layers", "batch", "blocks", "kv_heads", "length")
EXPERTS_AXES = ("layers", "batch", "blocks", "activation", "length")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Cache:
    """Keys, values, and pages' owners. Owners of a rank: slots 0..S-1, prompts S..S+P-1."""

    key: Any  # [layers, D, N, K, H, W]: head dim first, the score product is faster so on CPU
    value: Any  # [layers, D, N, K, W, H]
    owner: Any  # int32 [D, N]; S + P where free
    rank: Any  # int32 [D, N]: which of its owner's pages it is
    key_scale: Any = None  # float32 [layers, D, N, K, W] where key and value are int8
    value_scale: Any = None
    experts: Any = None  # int8 or int16 [layers, D, N, X, W]: of a mixture, where they are recorded


def empty(
    config: DecoderConfig,
    *,
    ranks: int,
    pages: int,
    page_size: int,
    owners: int,
    dtype: Any,
    record_experts: bool = False,
) -> Cache:
    """A cache without an owner, of `dtype`: a float's, or int8 with scales beside it."""
    head = (config.num_layers, ranks, pages, config.num_kv_heads)
    scaled = jnp.dtype(dtype) == jnp.int8
    choices = (config.num_layers, ranks, pages, config.experts_per_token, page_size)

    def scales():  # an array each: the two are donated apart
        return jnp.zeros((*head, page_size), jnp.float32) if scaled else None

    return Cache(
        jnp.zeros((*head, config.head_dim, page_size), dtype),
        jnp.zeros((*head, page_size, config.head_dim), dtype),
        jnp.full((ranks, pages), owners, jnp.int32),
        jnp.zeros((ranks, pages), jnp.int32),
        scales(),
        scales(),
        jnp.zeros(choices, recorded_dtype(config.num_experts)) if record_experts else None,
    )


def stored(cache: Cache, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Keys or values [..., H] as the cache keeps them, and their scales [...] where it has any."""
    if cache.key_scale is None:
        return x.astype(cache.key.dtype), None
    return quantise(x)


def release(cache: Cache, alive: jax.Array) -> Cache:
    """Takes back the pages of owners that are not `alive`, bool [D, S + P]."""
    owners = alive.shape[1]
    keeps = jnp.take_along_axis(alive, jnp.minimum(cache.owner, owners - 1), axis=1)
    gone = (cache.owner < owners) & ~keeps
    return dataclasses.replace(cache, owner=jnp.where(gone, owners, cache.owner))


def free_pages(cache: Cache, owners: int) -> jax.Array:
    """int32 [D]."""
    return (cache.owner == owners).sum(1, dtype=jnp.int32)


def held_pages(cache: Cache, slots: int) -> jax.Array:
    """How many pages each of the first `slots` owners has, int32 [D, S]."""
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :, None]
    return (cache.owner[:, None] == slot).sum(-1, dtype=jnp.int32)


def take_low(
    cache: Cache, need: jax.Array, which: jax.Array, owners: int
) -> tuple[Cache, jax.Array]:
    """The lowest free pages, one to each slot in `need`, bool [D, S], in the order of slots.

    `which` int32 [D, S]: the number of that page among its slot's. Also returns the slots that got
    one, bool [D, S]: the last in order go without when there are not enough.
    """
    slots, pages = need.shape[1], cache.owner.shape[1]

    def of_rank(owner, rank, need, which):
        found = jnp.nonzero(owner == owners, size=slots, fill_value=pages)[0].astype(jnp.int32)
        nth = jnp.cumsum(need, dtype=jnp.int32) - 1
        page = jnp.where(need, found[nth], pages)
        slot = jnp.arange(slots, dtype=jnp.int32)
        owner = owner.at[page].set(slot, mode="drop")
        return owner, rank.at[page].set(which, mode="drop"), need & (page < pages)

    owner, rank, got = jax.vmap(of_rank)(cache.owner, cache.rank, need, which)
    return dataclasses.replace(cache, owner=owner, rank=rank), got


class PromptRows(NamedTuple):
    """A prompt's tokens in the row that they were read in."""

    key: jax.Array  # [layers, T, K, H]
    value: jax.Array  # [layers, T, K, H]
    experts: jax.Array | None = None  # int8 or int16 [layers, T, X]


def write_prompt(
    cache: Cache,
    rows: PromptRows,
    *,
    data_rank: jax.Array,
    owner: jax.Array,
    owners: int,
    offset: jax.Array,
    count: jax.Array,
) -> Cache:
    """Copies `count` pages of `rows` from token `offset` on to the highest free pages of a rank, as
    the pages 0, 1, ... of `owner`. All but `rows` are int32 scalars.

    T is whole pages; what lies beyond it is filled with its last token's. There must be as many
    free pages: the caller counts them.
    """
    key, value, experts = rows
    width, pages = cache.key.shape[-1], cache.owner.shape[1]
    layers, length, kv_heads, head_dim = key.shape
    most = length // width
    here = cache.owner[data_rank]
    found = jnp.nonzero(here[::-1] == owners, size=most, fill_value=-1)[0].astype(jnp.int32)
    nth = jnp.arange(most, dtype=jnp.int32)
    page = jnp.where((nth < count) & (found >= 0), pages - 1 - found, pages)
    shape = (layers, most, width, kv_heads, head_dim)
    source = jnp.minimum(offset + jnp.arange(length, dtype=jnp.int32), length - 1)
    k, key_scale = stored(cache, key[:, source].reshape(shape))
    v, value_scale = stored(cache, value[:, source].reshape(shape))

    def put(pages, new, *order):
        new = new.transpose(0, 1, *order)
        return pages.at[:, data_rank, page].set(new, mode="drop")

    cache = dataclasses.replace(
        cache,
        key=put(cache.key, k, 3, 4, 2),
        value=put(cache.value, v, 3, 2, 4),
        owner=cache.owner.at[data_rank, page].set(owner, mode="drop"),
        rank=cache.rank.at[data_rank, page].set(nth, mode="drop"),
    )
    if experts is not None:
        experts = experts[:, source].reshape(*shape[:3], -1)
        cache = dataclasses.replace(cache, experts=put(cache.experts, experts, 3, 2))
    if key_scale is None:
        return cache
    return dataclasses.replace(
        cache,
        key_scale=put(cache.key_scale, key_scale, 3, 2),
        value_scale=put(cache.value_scale, value_scale, 3, 2),
    )


def place(cache: Cache, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each slot's tokens go: their pages, N for none, and places there, as `position`.

    `position` int32 [D, S, ...]: of the tokens among their slot's own, negative for none.
    """
    width, pages = cache.key.shape[-1], cache.owner.shape[1]
    among = (1,) * (position.ndim - 2)  # the tokens of a slot
    slot = jnp.arange(position.shape[1], dtype=jnp.int32).reshape(1, -1, *among, 1)
    owner, rank = (x.reshape(len(x), 1, *among, pages) for x in (cache.owner, cache.rank))
    hit = (owner == slot) & (rank == (position // width)[..., None])
    found = (position >= 0) & hit.any(-1)
    return jnp.where(found, jnp.argmax(hit, axis=-1).astype(jnp.int32), pages), position % width


def append(
    cache: Cache,
    key: jax.Array,
    value: jax.Array,
    page: jax.Array,
    within: jax.Array,
    experts: jax.Array | None = None,
) -> Cache:
    """Writes tokens where `place` says: key, value [layers, D, S, K, H] and experts
    [layers, D, S, X], one to each of `page` and `within`, int32 [D, S]; S: slots, or slots times
    the new tokens of one."""
    ranks = jnp.arange(page.shape[0], dtype=jnp.int32)[:, None]
    data_rank = jnp.broadcast_to(ranks, page.shape)
    # advanced indices around slices put the indexed dims first: [D, S, layers, K, H]
    (k, key_scale), (v, value_scale) = (
        stored(cache, x.transpose(1, 2, 0, 3, 4)) for x in (key, value)
    )

    def put(pages, new):
        return pages.at[:, data_rank, page, :, within].set(new, mode="drop")

    cache = dataclasses.replace(
        cache,
        key=cache.key.at[:, data_rank, page, :, :, within].set(k, mode="drop"),
        value=put(cache.value, v),
    )
    if experts is not None:
        new = experts.transpose(1, 2, 0, 3)
        cache = dataclasses.replace(cache, experts=put(cache.experts, new))
    if key_scale is None:
        return cache
    return dataclasses.replace(
        cache,
        key_scale=put(cache.key_scale, key_scale),
        value_scale=put(cache.value_scale, value_scale),
    )


def tables(cache: Cache, *, first: int, count: int, longest: int) -> jax.Array:
    """Page ids int32 [D, count, longest] of the owners first, first + 1, ...; N where none."""
    ranks, pages = cache.owner.shape
    page = jnp.broadcast_to(jnp.arange(pages, dtype=jnp.int32), (ranks, pages))
    data_rank = jnp.broadcast_to(jnp.arange(ranks, dtype=jnp.int32)[:, None], (ranks, pages))
    owner = cache.owner - first
    owner = jnp.where((owner >= 0) & (owner < count), owner, count)
    table = jnp.full((ranks, count, longest), pages, jnp.int32)
    return table.at[data_rank, owner, cache.rank].set(page, mode="drop")
