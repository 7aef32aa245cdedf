"""Attention and appending by the kernels of models/kernels, on each device's own pages.

D data ranks, O owners of a rank, S slots of a rank, K key/value heads, R query rows of one, H head
dim, N pages of a rank, W tokens per page, C pages of the longest owner.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from distflow_jax.models.kernels.decode_attention import members_attention, partial_attention
from distflow_jax.models.kernels.decode_tpu import LANES, Members
from distflow_jax.models.kernels.merge_partial import PartialAttention, merge
from distflow_jax.rollout.kv_cache import pages as cache_lib
from distflow_jax.rollout.kv_cache.pages import Cache
from distflow_jax.rollout.kv_cache.shared_prompt_attention import Contexts, OverCache, answering

_TILE_BYTES = 32  # of a tile's rows: 16 of bfloat16


def _spec(heads: int, mesh: Mesh, before: int, after: int) -> PartitionSpec:
    """[D, `before` dims, K, `after` dims]: ranks over data, heads over tensor where they divide."""
    over = "tensor" if heads % mesh.shape["tensor"] == 0 else None
    return PartitionSpec("data", *[None] * before, over, *[None] * after)


def _page_spec(heads: int, mesh: Mesh) -> PartitionSpec:
    """[layers, D, N, K, ...]: pages, and their scales."""
    return PartitionSpec(None, *_spec(heads, mesh, 1, 0))


class Owners(NamedTuple):
    """Owners of pages, slots or prompts."""

    table: jax.Array  # int32 [D, O, C]: their pages
    length: jax.Array  # int32 [D, O]: tokens of each that count
    pages: int  # of a rank, that they have at most
    members: Members | None = None  # slots that read them, each field [D, ...]; None: owners read


def over_table(
    q: jax.Array,
    cache: Cache,
    layer: jax.Array,
    owners: Owners,
    first: jax.Array | None = None,
    *,
    mesh: Mesh,
    implementation: str,
) -> PartialAttention:
    """Rows q [D, O, K, R, H] over the pages of their owners in one layer, or those of the owners'
    members, [D, S, K, R, H].

    `first` int32 [D, O, R] or [D, S, R]: the first token of the owner that each row sees, None for
    all. Returns out float32 like q, and the log-sum-exp [D, O, K, R] or [D, S, K, R].
    """
    heads = q.shape[2]
    per_row = {
        name: x for name, x in (("first", first), ("members", owners.members)) if x is not None
    }

    def local(q, pages, layer, table, length, per_row):
        layers, _, number = pages["key_pages"].shape[:3]
        # layers are not sliced: a kernel's operand would be a copy of the layer
        flat = jax.tree.map(lambda x: x.reshape(layers * number, *x.shape[3:]), pages)
        attention = partial_attention if owners.members is None else members_attention
        part = attention(
            q[0],
            table=table[0] + layer * number,
            length=length[0],
            implementation=implementation,
            most_pages=owners.pages,
            **flat,
            **jax.tree.map(lambda x: x[0], per_row),
        )
        return jax.tree.map(lambda x: x[None], part)

    row = _spec(heads, mesh, 1, 2)
    ranks = PartitionSpec("data")
    pages = {
        "key_pages": cache.key,
        "value_pages": cache.value,
        "key_scale": cache.key_scale,
        "value_scale": cache.value_scale,
    }
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(row, _page_spec(heads, mesh), PartitionSpec(), ranks, ranks, ranks),
        out_specs=(row, _spec(heads, mesh, 1, 1)),
        check_vma=False,  # the kernels do not say how their results vary over the mesh
    )(q, pages, layer, owners.table, owners.length, per_row)


def over_cache(
    cache: Cache,
    contexts: Contexts,
    *,
    members: int,
    longest: tuple[int, int],
    mesh: Mesh,
    implementation: str,
    sliding_window: int = 0,
    queries: int = 1,
) -> OverCache:
    """Attention over slots' own pages and those of their prompts, at most `longest` of each.

    At most `members` slots read a prompt. With a
    `sliding_window` the result takes a layer's window too, for Q = `queries` new tokens of a slot.
    """
    own, prompts, prompt, member = contexts
    slots, number, pages = prompt.shape[1], prompts.shape[1], cache.owner.shape[1]
    tables = (
        cache_lib.tables(cache, first=0, count=slots, longest=longest[0]),
        cache_lib.tables(cache, first=slots, count=number, longest=longest[1]),
    )
    of_slots = min(slots * longest[0], pages)
    slot_owners = Owners(tables[0], own, of_slots)
    table = jax.vmap(lambda p, m: answering(p, m, number, members))(prompt, member)
    readers = Members(table.reshape(len(prompt), number, members), prompt, member)
    # a page has one owner: prompts have what full slots leave, or all where slots could take all
    prompt_owners = Owners(tables[1], prompts, pages - of_slots or pages, readers)
    options = {"mesh": mesh, "implementation": implementation}

    def attend(q, layer, seen, window=None):
        first_own = first_shared = None
        if sliding_window:
            first_shared, first_own = contexts.first_seen(window, q.shape[3], queries)
        shared = over_table(q, cache, layer, prompt_owners, first_shared, **options)
        mine = over_table(q, cache, layer, slot_owners, first_own, **options)
        return merge((seen, shared, mine))

    return attend


def append_pages(
    cache: Cache,
    key: jax.Array,
    value: jax.Array,
    page: jax.Array,
    within: jax.Array,
    mesh: Mesh,
    experts: jax.Array | None = None,
) -> Cache:
    """Writes tokens page by page, S slots times the new tokens of one: key, value
    [layers, D, S, K, H] and experts [layers, D, S, X].

    `page` int32 [D, S], N to drop it; `within` int32 [D, S]: its place there. On TPUs a scatter
    into the cache makes XLA copy all of it; a page that is read, changed and written back does not.
    Of a page of values the rows of one tile are enough; a token of keys is in every tile.
    """
    heads = key.shape[3]
    (k, key_scale), (v, value_scale) = (cache_lib.stored(cache, x) for x in (key, value))
    new = {"key": k, "value": v, "key_scale": key_scale, "value_scale": value_scale}
    new = {name: x for name, x in (new | {"experts": experts}).items() if x is not None}
    # in a page, and in `new`: dims for the page, values' tile, the token
    added = {"key": (2, 5), "value": (2, 4, 5), "key_scale": (2, 4), "value_scale": (2, 4)}
    added["experts"] = (2, 4)

    def local(buffers, new, page, within):
        pages, value = buffers["key"].shape[2], buffers["value"]
        tiles = (*value.shape[:4], -1, _tile_rows(value), value.shape[-1])
        buffers = buffers | {"value": value.reshape(tiles)}

        def put(slot, buffers):
            at = jnp.minimum(page[0, slot], pages - 1)

            def change(buffer, new, dims):
                (first, *tile, token), sizes = dims, list(buffer.shape)
                rows = sizes[token]
                starts = {first: at} | {dim: within[0, slot] // rows for dim in tile}
                for dim in starts:
                    sizes[dim] = 1
                begin = [starts.get(dim, 0) for dim in range(buffer.ndim)]
                here = jnp.arange(rows, dtype=jnp.int32) == within[0, slot] % rows
                here &= page[0, slot] < pages
                here = here.reshape([rows if dim == token else 1 for dim in range(buffer.ndim)])
                old = jax.lax.dynamic_slice(buffer, begin, sizes)
                changed = jnp.where(here, jnp.expand_dims(new[:, :, slot], dims), old)
                return jax.lax.dynamic_update_slice(buffer, changed, begin)

            return {name: change(x, new[name], added[name]) for name, x in buffers.items()}

        buffers = jax.lax.fori_loop(0, page.shape[1], put, buffers)
        return buffers | {"value": buffers["value"].reshape(value.shape)}

    ranks = PartitionSpec("data")
    pages = {name: _page_spec(heads, mesh) for name in new}
    if experts is not None:  # they have no heads
        pages["experts"] = PartitionSpec(None, "data")
    written = jax.shard_map(
        local,
        mesh=mesh,
        # slots where the pages were: the specs are the same
        in_specs=(pages, pages, ranks, ranks),
        out_specs=pages,
        check_vma=False,
    )({name: getattr(cache, name) for name in new}, new, page, within)
    return dataclasses.replace(cache, **written)


def _tile_rows(value: jax.Array) -> int:
    """Tokens in a tile of a page of values [..., W, H] as XLA lays it out for TPUs; W where a tile
    has all, as with tokens along the lanes."""
    width, head_dim = value.shape[-2:]
    rows = _TILE_BYTES // value.dtype.itemsize
    return rows if head_dim % LANES == 0 and width % rows == 0 else width
