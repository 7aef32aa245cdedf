"""The decode state of one engine: pending commands to its slots, and the call in flight."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from distflow_jax.rollout.decode_state import DecodeState
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.engine.slot_updates import Injection, SlotRequest
from distflow_jax.rollout.prefill.prefill import Prefix
from distflow_jax.rollout.scheduling.sequences import CachedPrompt, DecodeCall, SlotSequence


class DecodeCalls:
    """Runs an engine's programs on its decode state.

    Commands that end slots, unpin prompts and feed slots are collected, and flushed in one program
    before the next one that depends on them.
    """

    def __init__(self, engine: RolloutEngine, state: DecodeState):
        """`state`: all slots free. It is donated."""
        self.engine = engine
        self.in_flight: DecodeCall | None = None
        self._state = state
        self._drop: list[int] = []
        self._unhold: list[tuple[int, int]] = []
        self._inject: list[Injection] = []
        self._exit_below = 0

    @property
    def state(self) -> DecodeState:
        """The result of the last program; donated to the next one."""
        return self._state

    def end_slot(self, slot: int) -> None:
        """Ends a slot with the next flush."""
        self._drop.append(slot)

    def unpin(self, rank: int, entry: int) -> None:
        """Frees a prompt that no slot reads with the next flush."""
        self._unhold.append((rank, entry))

    def inject(self, injection: Injection) -> None:
        """Injects tokens into a slot with the next flush."""
        self._inject.append(injection)

    def cancel_injection(self, slot: int) -> None:
        """Drops the pending injection of a slot."""
        self._inject = [one for one in self._inject if one.slot != slot]

    def flush(self, exit_below: int | None = None) -> None:
        """Runs the pending commands. `exit_below`: see RolloutEngine.change."""
        exit_below = self._exit_below if exit_below is None else exit_below
        if self._drop or self._unhold or self._inject or exit_below != self._exit_below:
            self._state = self.engine.change(
                self._state,
                drop=self._drop,
                unhold=self._unhold,
                inject=self._inject,
                exit_below=exit_below,
            )
            self._drop, self._unhold, self._inject = [], [], []
            self._exit_below = exit_below

    def flush_unpinned(self) -> None:
        """Flushes where prompts are unpinned: their entries may be another prompt's next."""
        if self._unhold:
            self.flush()

    def insert(
        self,
        prefix: Prefix,
        prompt: CachedPrompt,
        slots: Sequence[int],
        requests: Sequence[SlotRequest],
        *,
        members: Sequence[int],
        new: bool,
    ) -> None:
        """Starts sequences in slots. `new`: the prompt has still to be written into the cache."""
        options = {"entry": prompt.entry, "members": members, "hold": prompt.pinned}
        if new:
            self._state, _ = self.engine.start(prefix, self._state, slots, requests, **options)
        else:
            self._state = self.engine.join(prefix, self._state, slots, requests, **options)

    def begin(self, params: Any, version: int, running: dict[int, SlotSequence]) -> None:
        """Begins to decode for `running`, by the smaller program where they are few."""
        of_rank = [0] * self.engine.shapes.ranks
        for sequence in running.values():
            of_rank[sequence.prompt.rank] += 1
        few = max(of_rank) <= self.engine.few_slots
        self._state, result = self.engine.generate(params, self._state, few=few)
        result.copy_to_host_async()
        self.in_flight = DecodeCall(result, version, running)

    def collect(self, slots: Sequence[int], ends: Collection[int]) -> tuple[jax.Array, list[int]]:
        """Begins to send the experts recorded of up to `width` slots to the host; frees `ends`.

        Returns the experts, int8 or int16 [width, T, layers, experts of a token], and each rank's
        free pages.
        """
        self._state, experts, free = self.engine.collect(self._state, slots, ends=ends)
        experts.copy_to_host_async()
        return experts, [int(n) for n in np.asarray(free)]
