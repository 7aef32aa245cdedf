"""Reading prompts: several short ones in one row, a long one in pieces, after a beginning or whole.

T tokens of a row, X tokens read before (and room), G prompts of a row at most, K key/value heads,
H head dim, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from distflow_jax.models.attention import masked_attention, within
from distflow_jax.models.transformer import head_logits, hidden_states
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.rollout.decode_state import (
    EngineConfig,
    StateShapes,
    longest_read,
    pages_of,
)


@struct.dataclass
class Beginning:
    """What all prompts of a row begin with, read before."""

    key: Any  # [layers, X, K, H]
    value: Any  # [layers, X, K, H]
    length: Any  # int32, tokens; what lies beyond them is finite and not looked at


@struct.dataclass
class Prefix:
    """A prompt that has been read; it may share its arrays with others of its row."""

    key: Any  # [layers, T, K, H]
    value: Any  # [layers, T, K, H]
    logits: Any  # float32 [G, V]: of the next token
    row: Any  # int32: which of them
    offset: Any  # int32: where the prompt, or what follows its beginning, is in them, tokens
    length: Any  # int32, tokens, the beginning's included
    tokens: Any = None  # int32 [longest_read]: the prompt itself, where responses look things up
    beginning: Beginning | None = None  # where key, value hold only what follows it


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
    """Lays prompts of one row out; together they fit the largest bucket, and `max_prompts`."""
    size = config.page_size
    starts = np.cumsum([0, *map(len, prompts)])
    length = next(b for b in buckets(config) if b >= starts[-1])
    tokens, segment, position = (np.zeros(length, np.int32) for _ in range(3))
    last = np.zeros(max_prompts(length, size), np.int32)
    for number, (prompt, start) in enumerate(zip(prompts, starts, strict=False)):
        here = slice(start, start + len(prompt))
        tokens[here], segment[here] = prompt, number + 1
        position[here] = np.arange(len(prompt))
        last[number] = start + len(prompt) - 1
    return PackedPrompts(tokens, segment, position, last, tuple(map(int, starts[:-1])))


def _attention(q, k, v, mask, position_T, key_position_S, *window):
    """masked_attention of one row [1, T, N, H] over [1, S, K, H], within the layer's window where
    the model has windows; mask bool [T, S]."""
    if window:
        mask = mask & within(position_T[None], key_position_S[None], *window)[0]
    return masked_attention(q, k, v, mask[None])


def read_row(shapes: StateShapes, params, tokens_T, segment_T, position_T, last_G):
    """Keys, values [layers, T, K, H] and next-token logits [G, V] of a row of prompts."""
    with use_mesh(shapes.mesh):
        here = jnp.arange(tokens_T.shape[0], dtype=jnp.int32)
        mask = (segment_T[:, None] == segment_T[None]) & (here[:, None] >= here[None])

        def attend(q, k, v, _, *window):
            return _attention(q, k, v, mask, position_T, position_T, *window), (k[0], v[0])

        hidden, (key, value) = hidden_states(
            shapes.model,
            params,
            tokens_T[None],
            position_T[None],
            attend,
            dtype=jnp.dtype(shapes.config.dtype),
        )
        return key, value, head_logits(shapes.model, params, hidden[0][last_G])


def read_row_after(
    shapes: StateShapes,
    params,
    tokens_T,
    segment_T,
    position_T,
    last_G,
    beginning: Beginning,
):
    """`read_row` of what follows one beginning, which every prompt of the row sees.

    position_T counts from its end on.
    """
    with use_mesh(shapes.mesh):
        here = jnp.arange(tokens_T.shape[0], dtype=jnp.int32)
        own = (segment_T[:, None] == segment_T[None]) & (here[:, None] >= here[None])
        place = jnp.arange(beginning.key.shape[1], dtype=jnp.int32)
        seen = place < beginning.length
        seen = jnp.broadcast_to(seen[None], (len(here), len(seen)))
        mask = jnp.concatenate([seen, own], axis=1)
        position = beginning.length + position_T
        key_position = jnp.concatenate([place, position])

        def attend(q, k, v, before, *window):
            keys, values = (
                jnp.concatenate([old[None].astype(new.dtype), new], axis=1)
                for old, new in zip(before, (k, v), strict=True)
            )
            out = _attention(q, keys, values, mask, position, key_position, *window)
            return out, (k[0], v[0])

        hidden, (key, value) = hidden_states(
            shapes.model,
            params,
            tokens_T[None],
            position[None],
            attend,
            layer_inputs=(beginning.key, beginning.value),
            dtype=jnp.dtype(shapes.config.dtype),
        )
        return key, value, head_logits(shapes.model, params, hidden[0][last_G])


def read_piece(shapes: StateShapes, params, tokens_T, length, key, value, before):
    """Reads `length` tokens after the `before` that key, value [layers, X, K, H] hold.

    Returns these with the piece added, and logits [1, V]. X has room for T more.
    """
    with use_mesh(shapes.mesh):
        size = tokens_T.shape[0]
        here = before + jnp.arange(size, dtype=jnp.int32)
        seen = jnp.arange(key.shape[1], dtype=jnp.int32)
        mask = seen[None] <= here[:, None]

        def attend(q, k, v, cached, *window):
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, new[0], before, axis=0)
                for old, new in zip(cached, (k, v), strict=True)
            )
            out = _attention(q, keys[None], values[None], mask, here, seen, *window)
            return out, (keys, values)

        hidden, (key, value) = hidden_states(
            shapes.model,
            params,
            tokens_T[None],
            here[None],
            attend,
            layer_inputs=(key, value),
            dtype=jnp.dtype(shapes.config.dtype),
        )
        last = jax.lax.dynamic_slice_in_dim(hidden[0], length - 1, 1, axis=0)
        return key, value, head_logits(shapes.model, params, last)


def known_tokens(tokens: np.ndarray, config: EngineConfig) -> np.ndarray | None:
    """The prompt as `Prefix` carries it; None where nobody looks things up in it."""
    if not config.speculative_tokens:
        return None
    padded = np.zeros(longest_read(config), np.int32)
    padded[: len(tokens)] = tokens[: len(padded)]
    return padded


def no_tokens(shapes: StateShapes, room: int):
    """Keys and values [layers, room, K, H] of a prompt of which nothing has been read."""
    c = shapes.model
    empty = jnp.zeros((c.num_layers, room, c.num_kv_heads, c.head_dim), shapes.config.dtype)
    return empty, empty + 0


def beginning_room(config: EngineConfig) -> int:
    """X: room for the longest beginning that is kept, tokens in whole pages."""
    longest = min(config.prefix_tokens, config.max_prompt)
    return config.page_size * pages_of(longest, config.page_size)


def widen(key, value, offset, beginning: Beginning | None, room: int):
    """A prompt that was read, with room for what comes after: keys, values [layers, room, K, H].

    key, value [layers, T, K, H] from token `offset` on, after the beginning if there is one.
    """
    at = jnp.arange(room, dtype=jnp.int32)
    if beginning is None:
        at = jnp.minimum(offset + at, key.shape[1] - 1)
        return key[:, at], value[:, at]
    before = at < beginning.length
    first = jnp.minimum(at, beginning.key.shape[1] - 1)
    rest = jnp.clip(offset + at - beginning.length, 0, key.shape[1] - 1)
    before = before[None, :, None, None]
    return (
        jnp.where(before, beginning.key[:, first], key[:, rest].astype(beginning.key.dtype)),
        jnp.where(before, beginning.value[:, first], value[:, rest].astype(beginning.value.dtype)),
    )


def whole(prefix: Prefix, config: EngineConfig):
    """Keys, values [layers, whole pages, K, H] of a row in which the prompt lies, and where."""
    if prefix.beginning is None:
        return prefix.key, prefix.value, prefix.offset
    room = prefix.beginning.key.shape[1] + prefix.key.shape[1]
    longest = config.page_size * pages_of(longest_read(config), config.page_size)
    key, value = widen(
        prefix.key, prefix.value, prefix.offset, prefix.beginning, min(room, longest)
    )
    return key, value, jnp.zeros((), jnp.int32)
