"""The experts that the sampler routed each token to, read when a response has ended.

Experts lie in the cache's pages beside keys and values and share their fate: shared prompts,
chunked prefill, shared prefixes, preempted sequences, rejected guesses, further turns. A response
that has ended keeps its pages until its experts have been read. A token's experts are those that
made its keys and values: where weights were swapped and the cache was kept, the older weights'
choice, of a response that was read again the choice of those that read it last.

D data ranks, S slots and P prompts of a rank, C responses, T tokens, X experts of a token.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.parallel.rules import use_mesh
from distflow_jax.rollout.decode_state import DecodeState, StateShapes, longest_read, pages_of
from distflow_jax.rollout.kv_cache import pages as cache_lib


def collect(
    shapes: StateShapes, state: DecodeState, slot: jax.Array, ends: jax.Array
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Reads the experts of the tokens that some slots hold, and frees those of `ends`.

    `slot` int32 [C], out of range for none; `ends` bool [C]. Returns the state, the experts int8 or
    int16 [C, T, layers, X], T for the longest prompt and response, -1 where there is no token, and
    the free pages of each rank, int32 [D].
    """
    with use_mesh(shapes.mesh):
        ranks, slots = shapes.ranks, shapes.slots
        experts = jax.vmap(
            lambda rank, cache: _of_rank(shapes, slot, rank, cache),
            in_axes=(0, _RankCache(1, 0, 0, 0, 0, 0)),
        )(
            jnp.arange(ranks, dtype=jnp.int32),
            _RankCache(
                state.cache.experts,
                *_tables(shapes, state.cache),
                state.prompt_length,
                shapes.by_rank(state.prompt),
                shapes.by_rank(state.length),
            ),
        )
        experts = ~experts.sum(0, dtype=experts.dtype)  # one rank has it, the others zeros
        gone = jnp.where(ends, slot, ranks * slots)
        state = shapes.released(state.replace(kept=state.kept.at[gone].set(False, mode="drop")))
        free = cache_lib.free_pages(state.cache, shapes.owners)
        whole = NamedSharding(shapes.mesh, PartitionSpec())
        experts, free = (jax.lax.with_sharding_constraint(x, whole) for x in (experts, free))
        return state, experts, free


def _tables(shapes: StateShapes, cache: cache_lib.Cache) -> tuple[jax.Array, jax.Array]:
    """Pages of slots [D, S, n] and of prompts [D, P, n]."""
    config, slots = shapes.config, shapes.slots
    own = pages_of(config.max_response, config.page_size)
    prompts = pages_of(longest_read(config), config.page_size)
    return (
        cache_lib.tables(cache, first=0, count=slots, longest=own),
        cache_lib.tables(cache, first=slots, count=slots, longest=prompts),
    )


class _RankCache(NamedTuple):
    """The cache of one data rank, or the axes that ranks are on."""

    experts: Any  # int8 or int16 [layers, N, W, X], of N pages
    own_table: Any  # int32 [S, n]: pages of slots
    prompt_table: Any  # int32 [P, n]: pages of prompts
    prompt_length: Any  # int32 [P]
    prompt: Any  # int32 [S]: which one each slot reads
    length: Any  # int32 [S]: tokens of each slot, the prompt's included


def _of_rank(shapes: StateShapes, slot: jax.Array, rank: jax.Array, cache: _RankCache) -> jax.Array:
    """The experts of one rank's slots, [C, T, layers, X], with inverted bits: 0 where there is no
    token, or another rank has the slot."""
    experts, own_table, prompt_table, prompt_length, prompt, length = cache
    config, slots, size = shapes.config, shapes.slots, shapes.config.page_size
    is_here = (slot >= rank * slots) & (slot < (rank + 1) * slots)
    index = jnp.clip(slot - rank * slots, 0, slots - 1)
    entry = jnp.minimum(prompt[index], slots - 1)
    before = prompt_length[entry][:, None]
    at = jnp.arange(config.max_prompt + config.max_response, dtype=jnp.int32)[None]
    in_prompt, after = at < before, jnp.maximum(at - before, 0)

    def pages(table, owner, place):
        most = table.shape[1] - 1
        return jnp.take_along_axis(table[owner], jnp.minimum(place // size, most), axis=1)

    place = jnp.where(in_prompt, at, after)
    of_prompt, own = pages(prompt_table, entry, place), pages(own_table, index, place)
    page, within = jnp.where(in_prompt, of_prompt, own), place % size
    # advanced indices around a slice put the indexed dims first: [C, T, layers, X]
    found = experts[:, jnp.minimum(page, experts.shape[1] - 1), :, within]
    known = is_here[:, None] & (at < length[index][:, None])
    return jnp.where(known[..., None, None], ~found, 0)
