"""Slots of one engine: which sequence is in which, and where there is room for the next one."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from distflow_jax.rollout.decode_state import DecodeState, pages_of
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.engine.slot_updates import Injection, SlotRequest
from distflow_jax.rollout.prefill.prefill import Prefix
from distflow_jax.rollout.requests import GroupRequest, Partial
from distflow_jax.rollout.scheduling.cached_prompts import CachedPrompts
from distflow_jax.rollout.scheduling.decode_calls import DecodeCalls
from distflow_jax.rollout.scheduling.sequences import (
    CachedPrompt,
    DecodeCall,
    RecordedExperts,
    RequestGroup,
    SlotSequence,
)


class Slots:
    """The sequences in an engine's slots. `prompts` are those they attend to.

    A lane is a row of the decode batch, which a running sequence has, and a held one has not.
    """

    def __init__(self, engine: RolloutEngine, state: DecodeState):
        """`state`: all slots free. It is donated."""
        self._engine = engine
        self.calls = DecodeCalls(engine, state)
        self.prompts = CachedPrompts(self.calls)
        self.sequences: dict[int, SlotSequence] = {}  # running, held and returning, by slot
        self.held: dict[int, SlotSequence] = {}  # of these, by slot, the longest held first
        self.returning: dict[int, Injection] = {}  # what others are to read, the first first
        ranks, slots = engine.shapes.ranks, engine.shapes.slots
        self.free = [list(range((r + 1) * slots - 1, r * slots - 1, -1)) for r in range(ranks)]
        self.free_lanes = [engine.shapes.lanes] * ranks
        self._order = 0

    def running(self) -> dict[int, SlotSequence]:
        """Sequences that have not ended, in the order of their slots."""
        return {slot: s for slot, s in sorted(self.sequences.items()) if not s.ended}

    def going_on(self) -> list[int]:
        """Slots of the sequences that are running or returning."""
        return [slot for slot in sorted(self.sequences) if slot not in self.held]

    @property
    def can_preempt(self) -> bool:
        """Whether any sequence can be preempted: its tokens, of which the last is yet to be
        sampled, can be read again with its prompt."""
        config = self._engine.config
        return config.max_read >= config.max_prompt + config.max_response - 1

    def ranks(self) -> list[int]:
        """Data ranks, the one with the most places first."""
        return sorted(range(len(self.free)), key=lambda r: (-self.places(r), r))

    def places(self, rank: int) -> int:
        """Sequences that a data rank can take: it has a free slot and a free lane for each."""
        return min(len(self.free[rank]), self.free_lanes[rank])

    def longest_held(self, ranks: Collection[int]) -> int | None:
        """The slot of the sequence that has been held for the longest time on some data ranks."""
        return next((slot for slot, s in self.held.items() if s.prompt.rank in ranks), None)

    # -- admission --------------------------------------------------------------------------------

    def room(
        self, rank: int, tokens: int, slots: int, limit: int, cached: CachedPrompt | None = None
    ) -> bool:
        """Whether a data rank has pages for so many tokens of a prompt and slots that read it.

        `cached`: where the prompt is already, and `tokens` are 0. Where sequences can be preempted,
        a page of every slot is enough: the last one admitted is preempted where one wants another
        page and there is none. Else there must be pages for the longest responses allowed.
        """
        size, pages = self._engine.config.page_size, self.prompts.pages
        here = [s for s in self.sequences.values() if s.prompt.rank == rank]
        need = pages_of(tokens, size)
        if not here and slots == 1:  # the cache holds one of any size, and little more
            self.prompts.evict_until(rank, need + pages_of(limit, size), cached)
            return True
        if self.can_preempt:
            return pages[rank] >= need + slots + len(here)
        for sequence in here:
            own = sequence.tokens - sequence.admitted
            most = sequence.partial.request.sampling.limit - sequence.admitted
            need += pages_of(most, size) - pages_of(max(0, own - 1), size)
        return pages[rank] >= need + slots * pages_of(limit, size)

    def start_group(self, group: RequestGroup) -> bool:
        """Starts sequences of a group, whose prompt has been read, on the data rank with the most
        free slots. False where no rank has room."""
        for rank in self.ranks():
            cached = group.cached.get(rank)
            again = cached is None or not cached.members  # once more, where all have a reader
            places = self._engine.width if again else len(cached.members)
            count = min(len(group.waiting), self.places(rank), places)
            length = len(group.request.prompt.tokens) if again else 0
            there, limit = None if again else cached, group.request.sampling.limit
            while count and not self.room(rank, length, count, limit, there):
                count -= 1
            if count:
                partials = [
                    Partial(group.request, group.waiting.pop(), np.zeros(0, np.int32))
                    for _ in range(count)
                ]
                self.admit(group, group.prefix, rank, partials, shared=True)
                return True
        return False

    def admit(
        self,
        group: RequestGroup,
        prefix: Prefix,
        rank: int,
        partials: Sequence[Partial],
        *,
        shared: bool,
    ) -> None:
        """Starts sequences in free slots of a rank. `shared`: `prefix` is the group's prompt alone,
        which other sequences may read too."""
        self.calls.flush_unpinned()
        cached = group.cached.get(rank) if shared else None
        new = cached is None or not cached.members
        if new:
            if cached is not None:
                self.prompts.unpin(cached)
            cached = self.prompts.add(group, rank, int(prefix.length))
        slots, members, requests = [], [], []
        for partial in partials:
            slot, member, done = self.free[rank].pop(), cached.members.pop(), len(partial.tokens)
            slots.append(slot)
            members.append(member)
            # experts are collected once the response has ended: its pages have to stay
            keep = partial.request.hold or self._records(partial.request)
            requests.append(_slot_request(partial, keep))
            sequence = SlotSequence(group, partial, cached, member, self._order, done, done)
            sequence.logits_by = group.logits_by if shared else None
            self.sequences[slot] = sequence
            self._order += 1
        cached.readers += len(slots)
        self.free_lanes[rank] -= len(slots)
        cached.pinned = shared and bool(group.waiting)
        if shared:
            group.cached[rank] = cached
        self.calls.insert(prefix, cached, slots, requests, members=members, new=new)
        if not cached.pinned and shared:
            for at, other in tuple(group.cached.items()):
                self.prompts.unpin(other)  # its last sequences were admitted elsewhere
                self.prompts.free_entry(other)  # the device frees pages that nobody reads
                if other.entry < 0:
                    del group.cached[at]

    def vacate(self, slot: int, *, running: bool = True) -> SlotSequence:
        """Empties a slot. `running`: the engine has still to end it."""
        sequence = self.sequences.pop(slot)
        self.held.pop(slot, None)
        self.returning.pop(slot, None)
        cached = sequence.prompt
        cached.readers -= 1
        self.free_lanes[cached.rank] += not sequence.ended
        cached.members.append(sequence.member)
        if cached.entry >= 0:
            self.prompts.free_entry(cached)
            if cached.entry < 0:
                sequence.group.cached = {
                    rank: c for rank, c in sequence.group.cached.items() if c is not cached
                }
        if running:
            self.calls.end_slot(slot)
        self.calls.cancel_injection(slot)
        self.free[cached.rank].append(slot)
        self.free[cached.rank].sort(reverse=True)
        return sequence

    def return_pages(self, slot: int) -> None:
        """Counts the pages of a held sequence as free, before a call says so."""
        sequence = self.sequences[slot]
        cached, size = sequence.prompt, self._engine.config.page_size
        own = pages_of(max(0, sequence.tokens - sequence.admitted - 1), size)
        last = cached.readers == 1 and not cached.pinned
        self.prompts.pages[cached.rank] += own + (cached.pages if last else 0)

    def put_back(self, injection: Injection) -> None:
        """Has a held sequence go on with tokens to read, as soon as it has a lane."""
        self.held.pop(injection.slot).unfed = True
        self.returning[injection.slot] = injection
        self.inject_returning()

    def inject_returning(self) -> None:
        """Runs returning sequences again while there are lanes, the first one first."""
        for slot, injection in list(self.returning.items()):
            sequence = self.sequences[slot]
            if self.free_lanes[sequence.prompt.rank]:
                del self.returning[slot]
                self.calls.inject(injection)
                self.free_lanes[sequence.prompt.rank] -= 1
                sequence.ended = False

    # -- the call in flight -----------------------------------------------------------------------

    def await_call(self) -> tuple[DecodeCall, list[int]] | None:
        """Waits for the call in flight and frees slots and pages of sequences that ended in it.

        Returns the call, without sequences that were aborted meanwhile, and the slots to be
        preempted: the last one admitted of each rank that waits for a page.
        """
        call, self.calls.in_flight = self.calls.in_flight, None
        if call is None:
            return None
        result = call.result.convert_to_numpy()
        active, counts, unfed = result.active(), result.counts(), result.unfed()
        self.prompts.pages = [int(n) for n in result.free_pages()[:: self._engine.shapes.slots]]
        there = {slot: s for slot, s in call.running.items() if self.sequences.get(slot) is s}
        moved = set()
        ended = [slot for slot in there if not active[slot]]
        self._collect([slot for slot in ended if self._records(there[slot].partial.request)])
        for slot, sequence in there.items():
            sequence.tokens += int(counts[slot])
            sequence.unfed = bool(unfed[slot])
            if counts[slot] or not active[slot]:
                moved.add(sequence.prompt.rank)
        for slot in ended:
            there[slot].ended = True
            self.free_lanes[there[slot].prompt.rank] += 1
            if there[slot].partial.request.hold:
                self.held[slot] = there[slot]
            else:
                self.vacate(slot, running=False)
        stuck = []
        for rank in set(range(len(self.prompts.pages))) - moved:
            waits = [(s.order, i) for i, s in self.running().items() if s.prompt.rank == rank]
            if waits and self.prompts.pages[rank] == 0:
                stuck.append(max(waits)[1])
        return DecodeCall(result, call.version, there), sorted(stuck)

    def _records(self, request: GroupRequest) -> bool:
        return request.sampling.record and self._engine.config.record_experts

    def _collect(self, ended: Sequence[int]) -> None:
        """Collects the experts of ended sequences, and frees the slots of those not held."""
        ends = [s for s in ended if not self.sequences[s].partial.request.hold]
        for at in range(0, len(ended), self._engine.width):
            some = ended[at : at + self._engine.width]
            experts, self.prompts.pages = self.calls.collect(some, ends)
            for row, slot in enumerate(some):
                self.sequences[slot].recorded = RecordedExperts(experts, row)


def _slot_request(partial: Partial, keep: bool) -> SlotRequest:
    request, sampling = partial.request, partial.request.sampling
    if request.begun:
        sampling = dataclasses.replace(sampling, limit=request.begun + sampling.limit)
    return SlotRequest(
        request.prompt.counter,
        partial.sample,
        sampling,
        emitted=request.begun + len(partial.tokens),
        keep=keep,
    )
