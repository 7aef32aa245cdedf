"""Decoding some of the slots: those that are active, without rows for the others.

Where responses wait for the outside, more of them keep a slot than are decoded side by side. Where
lengths vary, most slots fall empty long before the longest response is there, and a step's products
cost the same for rows without a response: 64 rows of a SmolLM2-135M step cost 2.7 times as much as
16 on a CPU. The state of active slots is gathered, decoded as that of an engine with fewer slots,
and scattered to its slots again; keys and values stay where they are.

D data ranks, S slots and P prompts of a rank, S' slots and prompts of a rank in the small engine.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.rollout.decode_state import DecodeState, StateShapes
from distflow_jax.rollout.engine import decode

# of a slot; the fields that no step changes are not scattered
_CHANGED = ("logits", "length", "own", "emitted", "active", "forced", "forced_left", "history")
_UNCHANGED = (
    *("member", "limit", "kept", "counter", "sample", "temperature", "top_k", "top_p"),
    "shift",
)


def small_shapes(shapes: StateShapes) -> StateShapes | None:
    """Shapes with a quarter of the lanes; None where these are too few to be worth a program."""
    lanes = shapes.lanes // 4
    return None if lanes < 4 else narrowed(shapes, lanes)


def narrowed(shapes: StateShapes, slots: int) -> StateShapes:
    """Shapes with so many slots of a rank, and all pages."""
    tokens = shapes.pages * shapes.config.page_size * shapes.ranks  # of the one cache there is
    config = dataclasses.replace(
        shapes.config, slots=slots * shapes.ranks, lanes=0, cache_tokens=tokens
    )
    small = StateShapes(shapes.model, config, shapes.mesh)
    small.members = shapes.members
    return small


def generate_few(
    shapes: StateShapes,
    small: StateShapes,
    stop_ids: tuple[int, ...],
    params: Any,
    state: DecodeState,
) -> tuple[DecodeState, jax.Array]:
    """decode.generate where no data rank has more than S' active slots; the same result."""
    state = shapes.released(state)
    slot = _first(shapes.by_rank(state.active), small.slots)
    answers = shapes.by_rank(state.prompt)[..., None] == jnp.arange(shapes.slots)[None, None]
    entry = _first((answers & shapes.by_rank(state.active)[..., None]).any(1), small.slots)
    few = _narrow(shapes, small, state, slot, entry, answers)
    few, rows = decode.generate(small, stop_ids, params, few)
    return _widen(shapes, small, state, few, slot, entry), _all_rows(
        shapes, small, state, slot, rows
    )


def _first(mask: jax.Array, size: int) -> jax.Array:
    """Where `mask` bool [D, n] holds, int32 [D, size]; n beyond the last."""

    def of_rank(mask):
        return jnp.nonzero(mask, size=size, fill_value=len(mask))[0].astype(jnp.int32)

    return jax.vmap(of_rank)(mask)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [D, n, ...] at index [D, m], any value out of range: [D, m, ...]."""
    return jax.vmap(lambda x, index: x[jnp.minimum(index, len(x) - 1)])(x, index)


def _numbers(index: jax.Array, size: int, none: int) -> jax.Array:
    """The inverse of `index` int32 [D, m]: which place each of `size` has in it, else `none`."""
    places = jnp.arange(index.shape[1], dtype=jnp.int32)

    def of_rank(index):
        return jnp.full(size, none, jnp.int32).at[index].set(places, mode="drop")

    return jax.vmap(of_rank)(index)


def _narrow(shapes, small, state, slot, entry, answers) -> DecodeState:
    ranks, slots, width = shapes.ranks, shapes.slots, small.slots
    there = slot < slots

    def rows(x):
        return _take(shapes.by_rank(x), slot).reshape(ranks * width, *x.shape[1:])

    fields = {
        name: rows(x)
        for name in (*_CHANGED, *_UNCHANGED)
        if (x := getattr(state, name)) is not None
    }
    for name in ("active", "kept"):
        fields[name] &= there.reshape(-1)
    prompt = _take(shapes.by_rank(state.prompt), slot)
    fields["prompt"] = _take(
        jnp.pad(_numbers(entry, slots, width), ((0, 0), (0, 1)), constant_values=width), prompt
    ).reshape(-1)
    # a prompt that a response outside answers is not free when those inside have ended
    outside = shapes.by_rank(state.kept & ~state.active)[..., None]
    held = state.prompt_held | (answers & outside).any(1)
    fields["prompt_held"] = _take(held, entry) & (entry < slots)
    fields["prompt_length"] = _take(state.prompt_length, entry)

    # owners: slots and prompts inside by their new numbers, free pages free, others ownerless
    free, others = small.owners, small.owners + 1
    numbers = [
        _numbers(slot, slots, others),
        _numbers(entry, slots, others - width) + width,
        jnp.full((ranks, 1), free, jnp.int32),
    ]
    owner = jnp.take_along_axis(jnp.concatenate(numbers, axis=1), state.cache.owner, axis=1)
    cache = dataclasses.replace(state.cache, owner=owner)
    return state.replace(cache=cache, **fields)


def _widen(shapes, small, state, few, slot, entry) -> DecodeState:
    def put(x, new):
        new = new.reshape(shapes.ranks, small.slots, *x.shape[1:])
        placed = jax.vmap(lambda x, slot, new: x.at[slot].set(new, mode="drop"))
        return placed(shapes.by_rank(x), slot, new).reshape(x.shape)

    fields = {
        name: put(x, getattr(few, name))
        for name in _CHANGED
        if (x := getattr(state, name)) is not None
    }
    free = jnp.full((shapes.ranks, 1), shapes.owners, jnp.int32)
    numbers = jnp.concatenate([slot, shapes.slots + entry, free], axis=1)
    inside = few.cache.owner <= small.owners
    owner = jnp.take_along_axis(numbers, jnp.minimum(few.cache.owner, small.owners), axis=1)
    owner = jnp.where(inside, owner, state.cache.owner)
    return state.replace(cache=dataclasses.replace(few.cache, owner=owner), **fields)


def _all_rows(shapes, small, state, slot, rows) -> jax.Array:
    """Rows of the result for all slots: those outside have no tokens and do not go on."""
    by_rank = rows.reshape(shapes.ranks, small.slots, -1)
    emitted = 2 * decode.result_tokens(shapes.config)
    full = jnp.zeros((shapes.config.slots, rows.shape[1]), rows.dtype)
    full = full.at[:, emitted].set(state.emitted)
    full = full.at[:, -1].set(jnp.repeat(by_rank[:, 0, -1], shapes.slots))
    placed = jax.vmap(lambda x, slot, new: x.at[slot].set(new, mode="drop"))
    return placed(shapes.by_rank(full), slot, by_rank).reshape(full.shape)
