"""Commands to slots as columns, and the updates that carry them out: prompts are written into the
cache, responses start, end and are fed.

B slots in all, D data ranks, P prompts of a rank, G prompts of a row, V vocabulary, F tokens that
are fed at most. `columns`: arrays [n] by the name of the field of the decode state that they set,
with "slot", out of range to leave one out.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.rollout.decode_state import DecodeState, StateShapes, pages_of
from distflow_jax.rollout.kv_cache import pages
from distflow_jax.rollout.prefill.prefill import Prefix, whole
from distflow_jax.rollout.requests import SamplingParams


@dataclasses.dataclass(frozen=True)
class SlotRequest:
    """Per-response settings that JetStream's insert has no place for."""

    counter: int
    sample: int
    sampling: SamplingParams  # of one response: num_samples and record are not used
    emitted: int = 0  # tokens that the prefix holds of the response already
    keep: bool = False  # the slot's pages stay when the response has ended

    @property
    def columns(self) -> dict[str, Any]:
        """The values by the field of the decode state that each sets."""
        return {
            "counter": self.counter,
            "sample": self.sample,
            "limit": self.sampling.limit,
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "emitted": self.emitted,
            "kept": self.keep,
        }


@dataclasses.dataclass(frozen=True)
class Injection:
    """Tokens that a slot is fed before it draws the next."""

    slot: int
    tokens: Sequence[int]
    limit: int  # longest response allowed from now on
    emitted: int  # tokens of the response with these


class Injections(NamedTuple):
    """`Injection` of all slots as columns: int32 arrays, or their traced values."""

    forced: Any  # [B, F]: the tokens, the last ones of their rows
    given: Any  # [B]: how many of them; 0: the slot is not fed
    limit: Any  # [B]: longest response allowed from now on
    emitted: Any  # [B]: tokens of the response with these


_DTYPES = {"temperature": np.float32, "top_p": np.float32, "kept": bool}  # others: int32


def insert_columns(
    shapes: StateShapes,
    slots: Sequence[int],
    requests: Sequence[SlotRequest],
    members: Sequence[int] | None = None,
) -> tuple[np.int32, dict[str, np.ndarray]]:
    """(Data rank of the slots, columns of slot_updates.insert and admit, [width] each).

    `members`: see RolloutEngine.start. ValueError unless the slots, a request each, can share a
    prompt.
    """
    width, size = shapes.members, shapes.slots
    if not 0 < len(slots) <= width or len(slots) != len(requests):
        raise ValueError(f"insert takes 1 to {width} slots with a request each")
    if len({slot // size for slot in slots}) != 1:
        raise ValueError(
            f"slots {list(slots)} lie on several data ranks of {size} slots each: a prompt is "
            "shared within one"
        )
    empty = width - len(slots)
    members = range(len(slots)) if members is None else members
    columns = {
        # out of range: dropped
        "slot": np.array([*slots, *[shapes.config.slots] * empty], np.int32),
        "member": np.array([*members, *[0] * empty], np.int32),
    }
    values = [r.columns for r in requests]
    for name in values[0]:
        dtype = _DTYPES.get(name, np.int32)
        columns[name] = np.array([*(v[name] for v in values), *[0] * empty], dtype)
    return np.int32(slots[0] // size), columns


def change_columns(
    shapes: StateShapes,
    drop: Sequence[int],
    unhold: Sequence[tuple[int, int]],
    inject: Sequence[Injection],
) -> tuple[np.ndarray, np.ndarray, Injections]:
    """The arguments of slot_updates.change: slots that end, bool [B], prompts that are released,
    bool [D, P], and the tokens that slots are fed.

    ValueError for more tokens than can be injected into a slot.
    """
    b, width = shapes.config.slots, shapes.config.max_forced
    ends, given, limit, emitted = np.zeros(b, bool), *np.zeros((3, b), np.int32)
    forced = np.zeros((b, width), np.int32)
    free = np.zeros((shapes.ranks, shapes.slots), bool)
    ends[list(drop)] = True
    for rank, entry in unhold:
        free[rank, entry] = True
    for one in inject:
        if not 0 < len(one.tokens) <= width:
            raise ValueError(
                f"1 to {width} tokens can be injected into a slot, got {len(one.tokens)}"
            )
        forced[one.slot, width - len(one.tokens) :] = one.tokens
        given[one.slot], limit[one.slot] = len(one.tokens), one.limit
        emitted[one.slot] = one.emitted
    return ends, free, Injections(forced, given, limit, emitted)


Columns = dict[str, jax.Array]


def place_prompt(
    shapes: StateShapes, state: DecodeState, prefix: Prefix, data_rank: jax.Array, entry: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Writes a prompt into the cache as `entry` of a data rank, < 0: the lowest free one.

    The prompt is held until `admit` releases it. `data_rank` and `entry` are int32 scalars. Returns
    the entry too.
    """
    state = shapes.released(state)
    used = shapes.alive(state)[data_rank, shapes.slots :]
    entry = jnp.where(entry < 0, jnp.argmin(used).astype(jnp.int32), entry)
    rows, offset = whole(prefix, shapes.config)
    cache = pages.write_prompt(
        state.cache,
        pages.PromptRows(*rows),
        data_rank=data_rank,
        owner=shapes.slots + entry,
        owners=shapes.owners,
        offset=offset,
        count=pages_of(prefix.length, shapes.config.page_size),
    )
    state = state.replace(
        cache=cache,
        prompt_length=state.prompt_length.at[data_rank, entry].set(prefix.length),
        prompt_held=state.prompt_held.at[data_rank, entry].set(True),
    )
    return state, entry


def insert(
    shapes: StateShapes,
    state: DecodeState,
    prefix: Prefix,
    data_rank: jax.Array,
    entry: jax.Array,
    hold: jax.Array,
    columns: Columns,
) -> tuple[DecodeState, jax.Array]:
    """`place_prompt`, then `admit`. Returns the entry too, an int32 scalar."""
    state = _vacated(state, columns["slot"])
    state, entry = place_prompt(shapes, state, prefix, data_rank, entry)
    return admit(shapes, state, prompt_end(prefix), data_rank, entry, hold, columns), entry


class PromptEnd(NamedTuple):
    """The part of a prefix that is needed of a prompt whose keys and values are in the cache."""

    logits: jax.Array  # float32 [G, V]: of the next token
    row: jax.Array  # int32: which of them
    tokens: jax.Array | None  # int32 [longest_read]; None where responses look nothing up
    shift: jax.Array | None = None  # int32, see Prefix


def prompt_end(prefix: Prefix) -> PromptEnd:
    """The last logits of a prefix, and its tokens."""
    return PromptEnd(prefix.logits, prefix.row, prefix.tokens, prefix.shift)


def admit(
    shapes: StateShapes,
    state: DecodeState,
    end: PromptEnd,
    data_rank: jax.Array,
    entry: jax.Array,
    hold: jax.Array,
    columns: Columns,
) -> DecodeState:
    """Starts responses to a prompt in the cache.

    `data_rank` and `entry` int32 scalars: where it is. `hold`, a bool scalar, keeps the prompt
    though no slot reads it.
    """
    logits, row, tokens, shift = end
    slot = columns["slot"]
    state = shapes.released(_vacated(state, slot))

    def put(column, value):
        return column.at[slot].set(value, mode="drop")

    length = state.prompt_length[data_rank, entry]
    fields = {
        name: put(getattr(state, name), columns[name])
        for name in (
            *("member", "counter", "sample", "limit", "emitted", "kept"),
            *("temperature", "top_k", "top_p"),
        )
    }
    if shift is not None:
        fields["shift"] = put(state.shift, shift)
    if tokens is not None:
        width = state.history.shape[1]
        known = jnp.pad(tokens, (0, width - len(tokens)))
        fields["history"] = put(state.history, jnp.broadcast_to(known[None], (len(slot), width)))
    first = jax.lax.dynamic_index_in_dim(logits, row, keepdims=False)
    return state.replace(
        **fields,
        logits=put(state.logits, jnp.broadcast_to(first[None], (len(slot), *first.shape))),
        length=put(state.length, length),
        own=put(state.own, 0),
        prompt=put(state.prompt, entry),
        active=put(state.active, columns["limit"] > columns["emitted"]),
        forced_left=put(state.forced_left, 0),
        prompt_held=state.prompt_held.at[data_rank, entry].set(hold),
    )


def change(
    shapes: StateShapes,
    state: DecodeState,
    ends: jax.Array,
    free: jax.Array,
    injections: Injections,
    exit_below: jax.Array,
) -> DecodeState:
    """Ends the slots of `ends` bool [B], releases the prompts of `free` bool [D, P], and activates
    the slots that are fed. `exit_below`: an int32 scalar of the decode state."""
    forced, given, limit, emitted = injections
    wakes = given > 0
    return state.replace(
        active=(state.active | wakes) & ~ends,
        kept=state.kept & ~ends,
        forced=jnp.where(wakes[:, None], forced, state.forced),
        forced_left=jnp.where(wakes, given, state.forced_left),
        limit=jnp.where(wakes, limit, state.limit),
        emitted=jnp.where(wakes, emitted, state.emitted),
        prompt_held=state.prompt_held & ~free,
        exit_below=exit_below,
    )


def _vacated(state: DecodeState, slots: jax.Array) -> DecodeState:
    """The state with `slots` empty: their pages are free when they are next looked for."""
    return state.replace(
        active=state.active.at[slots].set(False, mode="drop"),
        kept=state.kept.at[slots].set(False, mode="drop"),
    )
