"""Who is in an engine's slots, which prompts lie in its cache, and what is free.

Prompts are `residents` of a data rank: as entry of its table of prompts, read by up to `width`
slots of that rank, and held while responses wait that will read them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from distflow_jax.rollout.decode_state import DecodeState, pages_of
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.engine.result_tokens import RolloutTokens
from distflow_jax.rollout.engine.slot_commands import Given, SlotRequest
from distflow_jax.rollout.prefill.prefill import Prefix
from distflow_jax.rollout.requests import GroupRequest, Partial, Response


@dataclasses.dataclass
class Resident:
    """A prompt in the cache of one data rank."""

    rank: int
    entry: int  # -1: gone
    members: list[int]  # numbers that no slot has, the next one last
    pages: int  # that it takes
    held: bool = False  # also without a slot: responses to it wait
    live: int = 0  # slots that answer it


@dataclasses.dataclass
class Group:
    """A request's responses that wait for a slot, and where its prompt is."""

    id: int
    request: GroupRequest
    waiting: list[int]  # samples, the next one last
    on_response: Callable[[Response], None] | None = None
    prefix: Prefix | None = None  # read, and needed while responses wait
    residents: dict[int, Resident] = dataclasses.field(default_factory=dict)  # by data rank
    left: int = 0  # responses that wait or are in slots
    logits_by: int | None = None  # version that read the prefix; None: the present one

    @property
    def turn(self) -> tuple[float, int, int]:
        """Groups go in by it: longest expected first, then longest limit, then as they came."""
        return (-self.request.prompt.expected_length, -self.request.sampling.limit, self.id)


@dataclasses.dataclass
class Slot:
    """Who is in a slot."""

    group: Group
    partial: Partial
    resident: Resident
    member: int
    order: int  # of admission: the last one in is the first to be put back
    admitted: int  # tokens that its response had then
    tokens: int  # that it has now; its `partial` learns of the last of them later
    ended: bool = False  # and kept
    logits_by: int | None = None  # version that its next token is drawn by; None: the present one
    recorded: "Recorded | None" = None  # of a response that has ended


class Recorded(NamedTuple):
    """Experts that tokens went through: one row of what RolloutEngine.collect gives."""

    experts: jax.Array
    row: int

    def read(self) -> np.ndarray:
        """Waits for it to be on the host; [T, layers, experts of a token]."""
        return np.asarray(self.experts)[self.row]


@dataclasses.dataclass(frozen=True)
class Call:
    """A decode call: under way, then done."""

    result: RolloutTokens
    version: int
    slots: dict[int, Slot]  # who goes on in it


class Slots:
    """The slots of one engine with its decode state.

    What changes is told to the engine at once before its next program: `tell`.
    """

    def __init__(self, engine: RolloutEngine, state: DecodeState):
        """`state`: all slots free. It is donated."""
        self.running: dict[int, Slot] = {}
        self.call: Call | None = None  # under way
        ranks, slots = engine.shapes.ranks, engine.shapes.slots
        self.free = [list(range((r + 1) * slots - 1, r * slots - 1, -1)) for r in range(ranks)]
        self.entries = [list(range(slots - 1, -1, -1)) for _ in range(ranks)]
        self.pages = [engine.shapes.pages] * ranks  # that are free
        self._residents: dict[tuple[int, int], tuple[Group, Resident]] = {}  # by rank and entry
        self._engine, self._state, self._order = engine, state, 0
        # what the engine is to be told
        self._drop: list[int] = []
        self._unhold: list[tuple[int, int]] = []
        self._give: list[Given] = []
        self._exit_below = 0

    @property
    def state(self) -> DecodeState:
        """What the engine's programs have made; donated to the next one."""
        return self._state

    def going(self) -> dict[int, Slot]:
        """Those that have not ended, in the order of their slots."""
        return {slot: held for slot, held in sorted(self.running.items()) if not held.ended}

    @property
    def reads_again(self) -> bool:
        """Whether any response can be put back and gone on with."""
        config = self._engine.config
        return config.max_read >= config.max_prompt + config.max_response

    # -- going in ---------------------------------------------------------------------------------

    def ranks(self) -> list[int]:
        """Data ranks, that with the most free slots first."""
        return sorted(range(len(self.free)), key=lambda r: (-len(self.free[r]), r))

    def room(
        self, rank: int, tokens: int, slots: int, limit: int, resident: Resident | None = None
    ) -> bool:
        """Whether a data rank has pages for so many tokens of a prompt and slots that answer it.

        `resident`: where the prompt is already, and `tokens` are 0. Where responses can be read
        again, for a page of every slot: if one wants another and there is none, the last in is put
        back. Else for the longest that they may become.
        """
        size = self._engine.config.page_size
        running = [s for s in self.running.values() if s.resident.rank == rank]
        need = pages_of(tokens, size)
        if not running and slots == 1:  # the cache holds one of any size, and little more
            self._clear(rank, need + pages_of(limit, size), resident)
            return True
        if self.reads_again:
            return self.pages[rank] >= need + slots + len(running)
        for held in running:
            own = held.tokens - held.admitted
            most = held.partial.request.sampling.limit - held.admitted
            need += pages_of(most, size) - pages_of(max(0, own - 1), size)
        return self.pages[rank] >= need + slots * pages_of(limit, size)

    def start_group(self, group: Group) -> bool:
        """Starts responses of a group, whose prompt has been read, on the data rank with the most
        free slots, or says no."""
        for rank in self.ranks():
            resident = group.residents.get(rank)
            again = resident is None or not resident.members  # once more, where all have a reader
            places = self._engine.width if again else len(resident.members)
            count = min(len(group.waiting), len(self.free[rank]), places)
            length = len(group.request.prompt.tokens) if again else 0
            there, limit = None if again else resident, group.request.sampling.limit
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
        group: Group,
        prefix: Prefix,
        rank: int,
        partials: Sequence[Partial],
        *,
        shared: bool,
    ) -> None:
        """Puts responses into free slots of a rank. `shared`: `prefix` is the group's prompt alone,
        which others may read too."""
        if self._unhold:  # of an entry that may be taken now
            self.tell()
        resident = group.residents.get(rank) if shared else None
        new = resident is None or not resident.members
        if new:
            if resident is not None:
                self._let_go(resident)
            if not self.entries[rank]:
                self._evict(self._idle(rank)[0])
            members = list(range(self._engine.width - 1, -1, -1))
            pages = pages_of(int(prefix.length), self._engine.config.page_size)
            resident = Resident(rank, self.entries[rank].pop(), members, pages)
            self._residents[rank, resident.entry] = group, resident
            self.pages[rank] -= pages
        slots, members, requests = [], [], []
        for partial in partials:
            slot, member, done = self.free[rank].pop(), resident.members.pop(), len(partial.tokens)
            slots.append(slot)
            members.append(member)
            # what is recorded of a response is read when it has ended: its pages have to stay
            keep = partial.request.hold or self._records(partial.request)
            requests.append(_slot_request(partial, keep))
            held = Slot(group, partial, resident, member, self._order, done, done)
            held.logits_by = group.logits_by if shared else None
            self.running[slot] = held
            self._order += 1
        resident.live += len(slots)
        resident.held = shared and bool(group.waiting)
        if shared:
            group.residents[rank] = resident
        options = {"entry": resident.entry, "members": members, "hold": resident.held}
        if new:
            self._state, _ = self._engine.start(prefix, self._state, slots, requests, **options)
        else:
            self._state = self._engine.join(prefix, self._state, slots, requests, **options)
        if not resident.held and shared:
            for other in group.residents.values():
                self._let_go(other)  # its last responses went elsewhere

    # -- going out --------------------------------------------------------------------------------

    def leave(self, slot: int, *, alive: bool = True) -> Slot:
        """Empties a slot. `alive`: the engine has still to be told."""
        held = self.running.pop(slot)
        resident = held.resident
        resident.live -= 1
        resident.members.append(held.member)
        if resident.entry >= 0:
            self._free_entry(resident)
            if resident.entry < 0:
                held.group.residents = {
                    rank: r for rank, r in held.group.residents.items() if r is not resident
                }
        if alive:
            self._drop.append(slot)
        self._give = [given for given in self._give if given.slot != slot]
        self.free[resident.rank].append(slot)
        self.free[resident.rank].sort(reverse=True)
        return held

    def unload(self, group: Group) -> None:
        """Forgets where the group's prompt is; it is read again when needed."""
        for resident in group.residents.values():
            self._let_go(resident)
            self._free_entry(resident)
        group.residents, group.prefix, group.logits_by = {}, None, None

    def _idle(self, rank: int) -> list[Resident]:
        """Prompts that nobody answers now, though responses to them wait, the last in turn first.

        There are some where a slot is free and no entry is: every other one has a slot.
        """
        found = [
            (group.turn, resident)
            for (at, _), (group, resident) in self._residents.items()
            if at == rank and not resident.live
        ]
        return [resident for _, resident in sorted(found, key=lambda f: f[0], reverse=True)]

    def _evict(self, resident: Resident) -> None:
        """Takes an idle prompt out of the cache; its group has still what was read, and puts it
        back in when its turn comes."""
        group, _ = self._residents[resident.rank, resident.entry]
        del group.residents[resident.rank]
        self._let_go(resident)
        self._free_entry(resident)
        self.pages[resident.rank] += resident.pages
        self.tell()  # before the entry is another's

    def _clear(self, rank: int, pages: int, resident: Resident | None) -> None:
        """Evicts idle prompts of a rank, but for `resident`, until so many pages are free."""
        for other in self._idle(rank):
            if self.pages[rank] >= pages:
                return
            if other is not resident:
                self._evict(other)

    def _let_go(self, resident: Resident) -> None:
        if resident.held:
            resident.held = False
            self._unhold.append((resident.rank, resident.entry))

    def _free_entry(self, resident: Resident) -> None:
        if not (resident.live or resident.held):
            del self._residents[resident.rank, resident.entry]
            self.entries[resident.rank].append(resident.entry)
            self.entries[resident.rank].sort(reverse=True)
            resident.entry = -1

    # -- the engine -------------------------------------------------------------------------------

    def give(self, given: Given) -> None:
        """Feeds a slot that has ended, which goes on then."""
        self.running[given.slot].ended = False
        self._give.append(given)

    def tell(self, exit_below: int | None = None) -> None:
        """Hands the engine what has changed. `exit_below`: see RolloutEngine.change."""
        exit_below = self._exit_below if exit_below is None else exit_below
        if self._drop or self._unhold or self._give or exit_below != self._exit_below:
            self._state = self._engine.change(
                self._state,
                drop=self._drop,
                unhold=self._unhold,
                give=self._give,
                exit_below=exit_below,
            )
            self._drop, self._unhold, self._give = [], [], []
            self._exit_below = exit_below

    def begin_call(self, params: Any, version: int) -> None:
        """Begins to decode for all that go on, by the smaller program where they are few."""
        going = self.going()
        of_rank = [0] * len(self.free)
        for held in going.values():
            of_rank[held.resident.rank] += 1
        few = max(of_rank) <= self._engine.few_slots
        self._state, result = self._engine.generate(params, self._state, few=few)
        result.copy_to_host_async()
        self.call = Call(result, version, going)

    def await_call(self) -> tuple[Call, list[int]] | None:
        """Waits for the call under way, frees slots and pages of what ended in it, and returns it
        with the slots to be put back: the last in of each rank that waits for a page.

        In what it returns are those alone that were not given up meanwhile.
        """
        if self.call is None:
            return None
        call, self.call = self.call, None
        result = call.result.convert_to_numpy()
        goes_on, counts = result.active(), result.counts()
        self.pages = [int(n) for n in result.free_pages()[:: self._engine.shapes.slots]]
        there = {s: held for s, held in call.slots.items() if self.running.get(s) is held}
        moved = set()
        ended = [slot for slot in there if not goes_on[slot]]
        self._collect([slot for slot in ended if self._records(there[slot].partial.request)])
        for slot, held in there.items():
            held.tokens += int(counts[slot])
            if counts[slot] or not goes_on[slot]:
                moved.add(held.resident.rank)
        for slot in ended:
            there[slot].ended = True
            if not there[slot].partial.request.hold:
                self.leave(slot, alive=False)
        stuck = []
        for rank in set(range(len(self.pages))) - moved:
            waits = [(s.order, i) for i, s in self.going().items() if s.resident.rank == rank]
            if waits and self.pages[rank] == 0:
                stuck.append(max(waits)[1])
        return Call(result, call.version, there), sorted(stuck)

    def _records(self, request: GroupRequest) -> bool:
        return request.sampling.record and self._engine.config.record_experts

    def _collect(self, ended: Sequence[int]) -> None:
        """Has what was recorded of responses that have ended sent to the host, and frees the slots
        of those that are not held."""
        ends = [s for s in ended if not self.running[s].partial.request.hold]
        for at in range(0, len(ended), self._engine.width):
            some = ended[at : at + self._engine.width]
            self._state, experts, free = self._engine.collect(self._state, some, ends=ends)
            experts.copy_to_host_async()
            self.pages = [int(n) for n in np.asarray(free)]
            for row, slot in enumerate(some):
                self.running[slot].recorded = Recorded(experts, row)


def _slot_request(partial: Partial, keep: bool) -> SlotRequest:
    request = partial.request
    return SlotRequest(
        request.prompt.counter,
        partial.sample,
        request.sampling,
        emitted=len(partial.tokens),
        keep=keep,
    )
