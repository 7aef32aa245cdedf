"""The scheduler's rounds: fill free slots, begin a decode call, deliver what came of the last one.

Between two rounds a decode call is in flight. A round waits for it, refills the slots that it has
emptied and begins the next one; only then, while the devices are at work, it delivers the tokens.
"""

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from distflow_jax.rollout.decode_state import DecodeState
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.occupancy import OccupancyClock
from distflow_jax.rollout.requests import Partial, Response, RolloutStats
from distflow_jax.rollout.scheduling.prefill_batches import PrefillBatches
from distflow_jax.rollout.scheduling.sequences import (
    DecodeCall,
    RequestGroup,
    SlotSequence,
    WaitingQueue,
)
from distflow_jax.rollout.scheduling.slots import Slots


class StepLoop:
    """Waiting sequences, slots, and what moves sequences between them.

    `ended`: responses by group that `Scheduler.step` has still to return. `parked`: held sequences
    whose slots and pages others needed, by group and sample. `stalled`: waiting sequences find no
    room beside held ones.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        params: Any,
        version: int,
        state: DecodeState,
        clock: OccupancyClock,
    ):
        self.engine, self.params, self.version = engine, params, version
        self.stats = RolloutStats()
        self.stops = frozenset(engine.stop_ids)
        self.slots = Slots(engine, state)
        self.waiting = WaitingQueue()
        self.prefill = PrefillBatches(engine, params, version, self.stats)
        self.groups: dict[int, RequestGroup] = {}
        self.ended: list[tuple[int, Response]] = []
        self.parked: dict[tuple[int, int], SlotSequence] = {}
        self.stalled = False
        self._clock = clock

    @property
    def free_slots(self) -> int:
        """Sequences that can be admitted: slots without one, where there are lanes too."""
        return sum(map(self.slots.places, range(len(self.slots.free))))

    def decode_round(self) -> None:
        """Waits for the call in flight, fills slots, begins the next call, delivers the last."""
        if self.slots.calls.in_flight is None:
            self._begin_call()
        call = self._await_call()
        self.look()
        if self.waiting.next_resumed:  # of these the tokens are needed now
            self._deliver(call)
            call = None
        self._begin_call()
        self._deliver(call)

    def look(self, **counted: int) -> None:
        """Adds to the occupancy what was done since the last look, and what is `counted`."""
        held = len(self.slots.held) + len(self.parked)
        running = self.engine.shapes.lanes * self.engine.shapes.ranks - sum(self.slots.free_lanes)
        waiting = self.waiting.count + len(self.slots.returning)
        self.stats.occupancy = self._clock.look(
            running=running, held=held, waiting=waiting, **counted
        )

    def drain(self) -> None:
        """Waits for the call in flight and delivers its tokens; begins no other."""
        self._deliver(self._await_call())

    # -- sequences --------------------------------------------------------------------------------

    def vacate(self, slot: int) -> SlotSequence:
        """Empties a slot."""
        self.stalled = False
        return self.slots.vacate(slot)

    def preempt(self, slot: int) -> None:
        """Empties a slot whose sequence is resumed later, before all that is new."""
        sequence = self.vacate(slot)
        self.waiting.push_resumed(sequence.group, sequence.partial)

    def park(self, slot: int) -> None:
        """Empties the slot of a held sequence, which is read again when it goes on."""
        self.slots.return_pages(slot)
        sequence = self.vacate(slot)
        self.parked[sequence.group.id, sequence.partial.sample] = sequence
        self.stats.parked += 1

    def park_one(self, ranks: Collection[int]) -> bool:
        """Parks the sequence that was held for the longest time. False where none is held on these
        data ranks, or it could not be read again."""
        slot = self.slots.longest_held(ranks) if self.slots.can_preempt else None
        if slot is None:
            return False
        self.park(slot)
        self.slots.calls.flush()  # before its pages are another's
        return True

    def finish(self, group: RequestGroup, count: int = 1) -> None:
        """Counts sequences of a group as done; forgets the group after the last one."""
        group.left -= count
        self.look(ended=count)
        if group.left == 0:
            self.slots.prompts.unload(group)
            self.groups.pop(group.id, None)

    def drop_waiting(self, group: RequestGroup) -> None:
        """Drops a group's sequences that have not begun."""
        self.waiting.remove_group(group)
        self.slots.prompts.unload(group)

    def load(self, params: Any, version: int) -> None:
        """Swaps the weights between two calls."""
        self.drain()  # by the weights that the call was begun with
        drawing = [s for s in self.slots.sequences.values() if not s.unfed]
        for holder in (*drawing, *self.groups.values()):
            # the next token is drawn from logits that are there already
            if holder.logits_by is None:
                holder.logits_by = self.version
        self.params, self.version = params, version
        self.prefill.load(params, version)

    # -- filling slots ----------------------------------------------------------------------------

    def _fill(self) -> None:
        """Admits waiting sequences while there are slots, pages and tokens to read.

        While sequences run, at most one row (or chunk) of prompts is read in a round, so that they
        do not wait long.
        """
        rows = 1 if self.slots.running() else math.inf
        self.slots.inject_returning()
        while self.free_slots or self._park_for_waiting():
            if self.waiting.next_resumed:
                if rows <= 0:
                    return
                if self._start_resumed(*self.waiting.next_resumed):
                    self.waiting.pop_resumed()
                    rows -= 1
                elif not self._park_for_waiting():
                    return
                continue
            group = self.waiting.next_group
            if group is None:
                return
            if group.prefix is None:
                if rows <= 0:
                    return
                self._prefill_next()
                rows -= 1
            if not self.slots.start_group(group) and not self._park_for_waiting():
                return
            if not group.waiting:
                self.waiting.pop_group()
                group.prefix = None

    def _park_for_waiting(self) -> bool:
        """Parks a held sequence where others wait, and a lane is free for them."""
        ranks = [rank for rank, lanes in enumerate(self.slots.free_lanes) if lanes]
        return bool(self.waiting) and self.park_one(ranks)

    def _prefill_next(self) -> None:
        """Reads the prompt of the next group, and of those after it that fit into the row."""
        waiting = [group for group in self.waiting.groups() if group.prefix is None]
        wanted = [(group.request.prompt, len(group.waiting)) for group in waiting]
        for index, prefix in self.prefill.next_row(wanted, self.free_slots).items():
            waiting[index].prefix = prefix

    def _start_resumed(self, group: RequestGroup, partial: Partial) -> bool:
        """Reads the tokens of a resumed sequence and starts it. False where no rank has room."""
        tokens = np.concatenate([group.request.prompt.tokens, partial.tokens]).astype(np.int32)
        for rank in self.slots.ranks():
            limit = partial.request.sampling.limit - len(partial.tokens)
            if self.slots.places(rank) and self.slots.room(rank, len(tokens), 1, limit):
                prompt, ahead = group.request.prompt, ()
                if partial.shown is not None:  # images of those behind are encoded with its own
                    ahead = [behind.shown for _, behind in self.waiting.resumed()]
                prefix = self.prefill.one(prompt, tokens, partial.shown, ahead)
                self.look(reread_tokens=len(tokens))
                self.slots.admit(group, prefix, rank, [partial], shared=False)
                return True
        return False

    # -- decode calls -----------------------------------------------------------------------------

    def _begin_call(self) -> None:
        """Fills slots and begins a decode call, where a sequence is running."""
        calls = self.slots.calls
        calls.flush()
        self._fill()
        running = self.slots.running()
        self.stalled = bool(self.waiting) and not running
        if running:
            # with sequences waiting, return as soon as enough slots for a group are free
            calls.flush(max(0, len(running) - self.engine.width) if self.waiting else 0)
            calls.begin(self.params, self.version, running)
            self.look()
            self.stats.generate_calls += 1

    def _await_call(self) -> DecodeCall | None:
        """The call in flight when it is done. Preempts sequences that wait for a page in vain."""
        if (done := self.slots.await_call()) is None:
            return None
        call, stuck = done
        for slot in stuck:
            if not self.park_one([self.slots.sequences[slot].prompt.rank]):
                self.stats.preempted += 1
                self.preempt(slot)
        return call

    def _deliver(self, call: DecodeCall | None) -> None:
        """Adds the tokens of a call to their responses, and delivers those that have ended."""
        if call is None:
            return
        host, ended = call.result, []
        logp, margin, counts = host.logp(), host.margin(), host.counts()
        guesses = host.speculation()
        for slot, sequence in call.running.items():
            count = int(counts[slot])
            self.stats.tokens += count
            if guesses.shape[1]:
                self.stats.proposed += int(guesses[slot, 0])
                self.stats.accepted += int(guesses[slot, 1])
            if count:
                version = np.full(count, call.version, np.int32)
                if sequence.logits_by is not None:
                    version[0], sequence.logits_by = sequence.logits_by, None
                tokens = host.get_result_at_slot(slot).tokens[0, :count]
                chunk = (tokens, logp[slot, :count], margin[slot, :count], version)
                sequence.partial.chunks.append(chunk)
            if sequence.ended:
                recorded, sequence.recorded = sequence.recorded, None
                experts = None if recorded is None else recorded.read()
                ended.append((sequence, sequence.partial.response(self.stops, experts)))
                if not sequence.partial.request.hold:
                    self.finish(sequence.group)
        self.ended += [(sequence.group.id, response) for sequence, response in ended]
        for sequence, response in ended:
            if sequence.group.on_response is not None:
                sequence.group.on_response(response)
