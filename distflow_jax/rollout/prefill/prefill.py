"""Prefill: several short prompts in one row, a long one in chunks, after a shared prefix or whole.

T tokens of a row, X tokens read before (and room), G prompts of a row at most, K key/value heads,
H head dim, V vocabulary, E experts of a token. Experts are None where they are not recorded.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.models.attention import within
from distflow_jax.models.kernels.library_attention import BY_MASK
from distflow_jax.models.moe import recorded_dtype
from distflow_jax.models.transformer import head_logits, hidden_states
from distflow_jax.parallel.rules import sharding, use_mesh
from distflow_jax.rollout.decode_state import (
    EngineConfig,
    StateShapes,
    longest_read,
    pages_of,
)
from distflow_jax.rollout.prefill.image_programs import Sight


@struct.dataclass
class SharedPrefix:
    """The tokens that all prompts of a row begin with, read before."""

    key: Any  # [layers, X, K, H]
    value: Any  # [layers, X, K, H]
    length: Any  # int32, tokens; what lies beyond them is finite and not looked at
    experts: Any = None  # int8 or int16 [layers, X, E]


@struct.dataclass
class Prefix:
    """A prompt that has been read; it may share its arrays with others of its row."""

    key: Any  # [layers, T, K, H]
    value: Any  # [layers, T, K, H]
    logits: Any  # float32 [G, V]: of the next token
    row: Any  # int32: which of them
    offset: Any  # int32: where the prompt, or what follows its shared prefix, is in them, tokens
    length: Any  # int32, tokens, the shared prefix's included
    tokens: Any = None  # int32 [longest_read]: the prompt itself, where responses look things up
    shared: SharedPrefix | None = None  # where key, value, experts hold only what follows it
    experts: Any = None  # int8 or int16 [layers, T, E]
    # int32: the position behind the prompt less its tokens, where rope_sections tell them apart
    shift: Any = None


@dataclasses.dataclass(frozen=True)
class PackedPrompts:
    """A row of whole prompts, one after the other."""

    tokens: np.ndarray  # int32 [T]
    segment: np.ndarray  # int32 [T]: number of the prompt from 1 on, 0 between prompts
    position: np.ndarray  # int32 [T]
    last: np.ndarray  # int32 [G]: where each prompt ends
    offsets: tuple[int, ...]  # where each begins


def buckets(config: EngineConfig) -> tuple[int, ...]:
    """Row lengths that are compiled: one page, twice as much, ... up to `prefill_tokens`."""
    size = config.page_size
    most = size * pages_of(min(config.prefill_tokens, row_limit(config)), size)
    found = [size]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return tuple(found)


def row_limit(config: EngineConfig) -> int:
    """The longest row that can be useful: a full load of the longest prompts."""
    return max(config.page_size, config.slots * config.max_prompt)


def max_prompts(length: int, page_size: int) -> int:
    """Prompts of a row of `length` tokens at most: each has logits over the whole vocabulary."""
    return max(1, 4 * length // page_size)


def pack(prompts: Sequence[np.ndarray], config: EngineConfig) -> PackedPrompts:
    """Lays out prompts, int32 [t] each, in one row. Together they must fit the largest bucket, and
    number at most `max_prompts`."""
    size = config.page_size
    starts = np.cumsum([0, *map(len, prompts)])
    # many short prompts fit a short row by their tokens, and not by their number
    length = next(
        b for b in buckets(config) if b >= starts[-1] and max_prompts(b, size) >= len(prompts)
    )
    tokens, segment, position = (np.zeros(length, np.int32) for _ in range(3))
    last = np.zeros(max_prompts(length, size), np.int32)
    for number, (prompt, start) in enumerate(zip(prompts, starts, strict=False)):
        here = slice(start, start + len(prompt))
        tokens[here], segment[here] = prompt, number + 1
        position[here] = np.arange(len(prompt))
        last[number] = start + len(prompt) - 1
    return PackedPrompts(tokens, segment, position, last, tuple(map(int, starts[:-1])))


def _attention(shapes, q, k, v, mask, places, *window, also=None):
    """Attention of one row [1, T, N, H] over [1, S, K, H], within the layer's window where
    the model has windows; mask bool [T, S]. `places`: positions of queries [T] and keys [S];
    `also`, a mask too, allows pairs of any distance."""
    if window:
        position_T, key_position_S = places
        mask = mask & within(position_T[None], key_position_S[None], *window)[0]
    if also is not None:
        mask = mask | also
    return BY_MASK[shapes.config.prefill_by](q, k, v, mask[None])


def _same_image(sight: Sight | None, start: Any, keys: int):
    """Mask bool [T, keys] of tokens that stand for one image, where these attend both ways; the
    row's own keys begin at `start`. None where they do not."""
    if sight is None or sight.image is None:
        return None
    own = (sight.image[:, None] == sight.image[None]) & (sight.image[:, None] > 0)
    empty = jnp.zeros((len(own), keys), bool)
    return jax.lax.dynamic_update_slice_in_dim(empty, own, start, axis=1)


def _read(shapes: StateShapes, params, tokens_T, position_T, attend, layer_inputs=None, sight=None):
    """Runs the network on a row: (keys, values, experts) as `attend` and the route return them,
    hidden states [T, D]."""
    if sight is not None and sight.rotary is not None:
        position_T = sight.rotary
    hidden, kept = hidden_states(
        shapes.model,
        params,
        tokens_T[None],
        position_T[None],
        attend,
        layer_inputs=layer_inputs,
        dtype=jnp.dtype(shapes.config.dtype),
        route=shapes.route,
        seen=None if sight is None else sight.seen,
    )
    if shapes.route is None:
        return (*kept, None), hidden[0]
    (key, value), experts = kept
    return (key, value, experts[:, 0]), hidden[0]


def read_row(shapes: StateShapes, params, tokens_T, segment_T, position_T, last_G, sight=None):
    """((keys, values [layers, T, K, H], experts [layers, T, E]), next-token logits [G, V]) of a row
    of prompts. `sight`: a Sight of a model with a tower."""
    with use_mesh(shapes.mesh):
        here = jnp.arange(tokens_T.shape[0], dtype=jnp.int32)
        mask = (segment_T[:, None] == segment_T[None]) & (here[:, None] >= here[None])

        also = _same_image(sight, 0, len(here))

        def attend(q, k, v, _, *window):
            places = position_T, position_T
            return _attention(shapes, q, k, v, mask, places, *window, also=also), (k[0], v[0])

        kept, hidden = _read(shapes, params, tokens_T, position_T, attend, sight=sight)
        return kept, head_logits(shapes.model, params, hidden[last_G])


def read_row_after(
    shapes: StateShapes,
    params,
    tokens_T,
    segment_T,
    position_T,
    last_G,
    shared: SharedPrefix,
    sight: Sight | None = None,
):
    """`read_row` of what follows one shared prefix, which every prompt of the row sees.

    position_T counts from its end on.
    """
    with use_mesh(shapes.mesh):
        here = jnp.arange(tokens_T.shape[0], dtype=jnp.int32)
        own = (segment_T[:, None] == segment_T[None]) & (here[:, None] >= here[None])
        place = jnp.arange(shared.key.shape[1], dtype=jnp.int32)
        seen = place < shared.length
        seen = jnp.broadcast_to(seen[None], (len(here), len(seen)))
        mask = jnp.concatenate([seen, own], axis=1)
        position = shared.length + position_T
        key_position = jnp.concatenate([place, position])
        also = _same_image(sight, len(place), mask.shape[1])

        def attend(q, k, v, before, *window):
            keys, values = (
                jnp.concatenate([old[None].astype(new.dtype), new], axis=1)
                for old, new in zip(before, (k, v), strict=True)
            )
            places = position, key_position
            out = _attention(shapes, q, keys, values, mask, places, *window, also=also)
            return out, (k[0], v[0])

        old = shared.key, shared.value
        kept, hidden = _read(shapes, params, tokens_T, position, attend, old, sight)
        return kept, head_logits(shapes.model, params, hidden[last_G])


def read_chunk(shapes: StateShapes, params, tokens_T, length, kept, before, sight=None):
    """Reads `length` tokens after the `before` that `kept` holds: (keys, values [layers, X, K, H],
    experts [layers, X, E]).

    Returns these with the chunk added, and logits [1, V]. X has room for T more.
    """
    with use_mesh(shapes.mesh):
        (key, value, experts), size = kept, tokens_T.shape[0]
        here = before + jnp.arange(size, dtype=jnp.int32)
        seen = jnp.arange(key.shape[1], dtype=jnp.int32)
        mask = seen[None] <= here[:, None]
        also = _same_image(sight, before, len(seen))

        def attend(q, k, v, cached, *window):
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, new[0], before, axis=0)
                for old, new in zip(cached, (k, v), strict=True)
            )
            places = here, seen
            out = _attention(shapes, q, keys[None], values[None], mask, places, *window, also=also)
            return out, (keys, values)

        old = key, value
        (key, value, new), hidden = _read(shapes, params, tokens_T, here, attend, old, sight)
        if new is not None:
            experts = jax.lax.dynamic_update_slice_in_dim(experts, new, before, axis=1)
        last = jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=0)
        return (key, value, experts), head_logits(shapes.model, params, last)


def takes_chunks(config: EngineConfig) -> bool:
    """Whether some prompts are too long for a row."""
    return longest_read(config) > buckets(config)[-1]


def chunk_room(config: EngineConfig) -> int:
    """X of a prompt that is read in chunks: the longest and a chunk, tokens in whole pages."""
    room = longest_read(config) + buckets(config)[-1]
    return config.page_size * pages_of(room, config.page_size)


def known_tokens(tokens: np.ndarray, config: EngineConfig) -> np.ndarray | None:
    """The prompt int32 [t] as `Prefix` carries it; None where responses look nothing up in it."""
    if not config.speculative_tokens:
        return None
    padded = np.zeros(longest_read(config), np.int32)
    padded[: len(tokens)] = tokens[: len(padded)]
    return padded


def no_tokens(shapes: StateShapes, room: int):
    """Keys, values [layers, room, K, H] and experts [layers, room, E] of a prompt of which nothing
    has been read."""
    c = shapes.model
    empty = jnp.zeros((c.num_layers, room, c.num_kv_heads, c.head_dim), shapes.config.dtype)
    experts = None
    if shapes.config.record_experts:
        choices = (c.num_layers, room, c.experts_per_token)
        experts = jnp.zeros(choices, recorded_dtype(c.num_experts))
    return empty, empty + 0, experts


def kept_shardings(shapes: StateShapes):
    """Layouts of what `no_tokens` makes: heads over tensor, as in the cache."""
    c = shapes.model
    shape = (c.num_layers, 1, c.num_kv_heads, c.head_dim)
    keys = sharding(shapes.mesh, ("layers", "length", "kv_heads", "head_dim"), shape)
    return keys, keys, NamedSharding(shapes.mesh, PartitionSpec())


def shared_room(config: EngineConfig) -> int:
    """X: room for the longest shared prefix that is kept, tokens in whole pages."""
    longest = min(config.prefix_tokens, config.max_prompt)
    return config.page_size * pages_of(longest, config.page_size)


def kept_of(prefix: Prefix):
    """(Keys, values, experts) of its arrays."""
    return prefix.key, prefix.value, prefix.experts


def widen(kept, offset, shared: SharedPrefix | None, room: int):
    """A prompt that was read, with room for what comes after: keys, values [layers, room, K, H] and
    experts [layers, room, E].

    `kept`: these three [layers, T, ...] from token `offset` on, after the shared prefix if there is
    one.
    """
    at = jnp.arange(room, dtype=jnp.int32)
    most = kept[0].shape[1] - 1
    if shared is None:
        at = jnp.minimum(offset + at, most)
        return jax.tree.map(lambda x: x[:, at], kept)
    before = at < shared.length
    first = jnp.minimum(at, shared.key.shape[1] - 1)
    rest = jnp.clip(offset + at - shared.length, 0, most)

    def one(old, new):
        is_before = before.reshape(1, -1, *[1] * (old.ndim - 2))
        return jnp.where(is_before, old[:, first], new[:, rest].astype(old.dtype))

    return jax.tree.map(one, (shared.key, shared.value, shared.experts), kept)


def whole(prefix: Prefix, config: EngineConfig):
    """(Keys, values [layers, whole pages, K, H], experts [layers, whole pages, E]) of a row in
    which the prompt lies, and where."""
    if prefix.shared is None:
        return kept_of(prefix), prefix.offset
    room = prefix.shared.key.shape[1] + prefix.key.shape[1]
    longest = config.page_size * pages_of(longest_read(config), config.page_size)
    kept = widen(kept_of(prefix), prefix.offset, prefix.shared, min(room, longest))
    return kept, jnp.zeros((), jnp.int32)
