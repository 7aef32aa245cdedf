"""Commands to slots as columns: responses that begin in them, tokens that they are fed."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from distflow_jax.rollout.decode_state import StateShapes
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
