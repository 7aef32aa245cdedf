"""Continuous batching: which response runs in which slot, and when a slot is refilled.

Between two steps a decode call is under way. A step waits for it, refills the slots that it has
emptied and begins the next one; only then, while the devices are at work, it hands on what came.

The order depends on what was submitted when, and on what was sampled, never on time: a rerun, and
every process that shares an engine, schedules alike.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distflow_jax.rollout.decode_state import DecodeState, longest_read, pages_of
from distflow_jax.rollout.engine import Given, RolloutEngine, RolloutTokens, SlotRequest
from distflow_jax.rollout.prefill import Prefix
from distflow_jax.rollout.prompt_reader import PromptReader
from distflow_jax.rollout.responses import GroupRequest, Partial, Response, RolloutStats


@dataclasses.dataclass
class _Resident:
    """A prompt in the cache of one data rank."""

    rank: int
    entry: int
    members: list[int]  # numbers that no slot has, the next one last
    held: bool = False  # also without a slot: responses to it wait
    live: int = 0  # slots that answer it


@dataclasses.dataclass
class _Group:
    """A request's responses that wait for a slot, and where its prompt is."""

    id: int
    request: GroupRequest
    waiting: list[int]  # samples, the next one last
    on_response: Callable[[Response], None] | None = None
    prefix: Prefix | None = None  # read, and needed while responses wait
    residents: dict[int, _Resident] = dataclasses.field(default_factory=dict)  # by data rank
    left: int = 0  # responses that wait or are in slots
    logits_by: int | None = None  # version that read the prefix; None: the present one


@dataclasses.dataclass
class _Slot:
    """Who is in a slot."""

    group: _Group
    partial: Partial
    resident: _Resident
    member: int
    order: int  # of admission: the last one in is the first to be put back
    admitted: int  # tokens that its response had then
    tokens: int  # that it has now; its `partial` learns of the last of them later
    ended: bool = False  # and kept
    logits_by: int | None = None  # version that its next token is drawn by; None: the present one


@dataclasses.dataclass(frozen=True)
class _Call:
    """A decode call: under way, then done."""

    result: RolloutTokens
    version: int
    slots: dict[int, _Slot]  # who goes on in it


class Scheduler:
    """Drives one engine: submit requests, call `step` until nothing is `busy`.

    One thread at a time. Where several processes share the engine all make the same calls.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        params: Any,
        *,
        version: int = 0,
        state: DecodeState | None = None,
    ):
        """`state`: all slots free; a new one by default. It is donated."""
        self.engine, self.version, self.stats = engine, version, RolloutStats()
        self._params = params
        self._state = engine.init_decode_state() if state is None else state
        self._stops = frozenset(engine.stop_ids)
        self._groups: dict[int, _Group] = {}
        self._heap: list[tuple[Any, ...]] = []  # groups with responses that wait, in their order
        self._resumed: list[tuple[_Group, Partial]] = []  # before all that is new; the next last
        self._running: dict[int, _Slot] = {}
        self._call: _Call | None = None  # under way
        self._ended: list[tuple[int, Response]] = []  # by group, that `step` has to return yet
        self._reader = PromptReader(engine, params, version, self.stats)
        self._next_id = self._order = 0
        self._paused = self._stalled = False
        ranks, slots = engine.shapes.ranks, engine.shapes.slots
        self._free = [list(range((r + 1) * slots - 1, r * slots - 1, -1)) for r in range(ranks)]
        self._entries = [list(range(slots - 1, -1, -1)) for _ in range(ranks)]
        self._pages = [engine.shapes.pages] * ranks
        # what the engine is to be told before its next call
        self._drop: list[int] = []
        self._unhold: list[tuple[int, int]] = []
        self._give: list[Given] = []
        self._exit_below = 0

    # -- what is wanted ---------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a response waits, runs, or is yet to be returned by `step`.

        Those that were returned and are held do not count.
        """
        waits = self._heap or self._resumed or self._ended
        return bool(waits) or any(not s.ended for s in self._running.values())

    @property
    def stalled(self) -> bool:
        """Whether what waits finds no room beside responses that are held: `step` does nothing
        until one of these is gone on with or released."""
        return self._stalled

    @property
    def free_slots(self) -> int:
        """Slots that no response holds."""
        return sum(map(len, self._free))

    def under_way(self) -> Iterator[tuple[int, Partial]]:
        """(id of its group, what has come of it so far) of each response that has begun."""
        for _, held in sorted(self._running.items()):
            if not held.ended:
                yield held.group.id, held.partial
        for group, partial in self._resumed:
            yield group.id, partial

    def submit(
        self, request: GroupRequest, on_response: Callable[[Response], None] | None = None
    ) -> int:
        """Adds a request; returns its id. ValueError for one that no slot can take.

        `on_response` is called as soon as a response has ended.
        """
        self._check(request)
        samples = list(range(request.num_samples - 1, -1, -1))
        group = self._new_group(request, samples, on_response)
        self._push(group)
        return group.id

    def step(self) -> list[Response]:
        """One round: waits for the decode call under way, reads prompts for free slots and fills
        these, begins the next call; returns what had ended in the one before.

        While responses run, at most one row (or piece) of prompts is read in a round, so that they
        do not wait long.
        """
        if self._paused or not self.busy:
            return []
        if self._call is None:
            self._begin_call()
        call = self._await_call()
        if self._resumed:  # of these the tokens are needed now
            self._hand_on(call)
            call = None
        self._begin_call()
        self._hand_on(call)
        ended, self._ended = self._ended, []
        return [response for _, response in ended]

    def abort(self, group_id: int) -> list[Response]:
        """Gives up a request; returns what has come of it that `step` has not returned."""
        cut = [response for index, response in self._ended if index == group_id]
        self._ended = [entry for entry in self._ended if entry[0] != group_id]
        group = self._groups.get(group_id)
        if group is None:
            return cut
        cut += [p.response(self._stops) for g, p in reversed(self._resumed) if g is group]
        self._resumed = [entry for entry in self._resumed if entry[0] is not group]
        for slot, held in sorted(self._running.items()):
            if held.group is group:
                if not held.ended:
                    cut.append(held.partial.response(self._stops))
                self._leave(slot)
        self._drop_waiting(group)
        group.left = 0
        self._settle(group)
        return cut

    def abort_sample(self, group_id: int, sample: int) -> None:
        """Gives up one response that is under way; the rest of its group goes on.

        ValueError where it is not under way.
        """
        for slot, held in sorted(self._running.items()):
            if held.group.id == group_id and held.partial.sample == sample:
                self._leave(slot)
                self._end(held.group)
                return
        for index, (group, partial) in enumerate(self._resumed):
            if group.id == group_id and partial.sample == sample:
                del self._resumed[index]
                self._end(group)
                return
        raise ValueError(f"response {sample} of request {group_id} is not under way")

    def pause(self) -> None:
        """`step` does nothing until `resume`; caches are kept."""
        self._paused = True

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._paused = False

    def export(self) -> list[Partial]:
        """Everything that waits or runs, in its order, with what was sampled so far.

        The scheduler is empty then, but for responses that have ended and are held, or are yet to
        be returned by `step`.
        """
        self._hand_on(self._await_call())
        partials = []
        for slot, held in sorted(self._running.items(), key=lambda item: item[1].order):
            if not held.ended:
                partials.append(held.partial)
                self._leave(slot)
                self._end(held.group)
        for group, partial in reversed(self._resumed):
            partials.append(partial)
            self._end(group)
        self._resumed.clear()
        nothing = np.zeros(0, np.int32)
        for group in [entry[-1] for entry in sorted(self._heap, key=lambda e: e[:-1])]:
            partials += [Partial(group.request, s, nothing) for s in reversed(group.waiting)]
            group.left -= len(group.waiting)
            self._drop_waiting(group)
            self._settle(group)
        return partials

    def restore(
        self, partials: Sequence[Partial], on_response: Callable[[Response], None] | None = None
    ) -> None:
        """Goes on with exported responses, before everything else: their tokens are read again."""
        for partial in partials:
            self._check(partial.request, len(partial.tokens))
        for partial in reversed(partials):
            group = self._new_group(partial.request, [], on_response)
            group.left = 1
            self._resumed.append((group, partial))

    def load(self, params: Any, version: int, *, cache: str = "keep") -> None:
        """Swaps the weights between two calls.

        `cache`: "keep" the keys and values of responses under way, or "recompute" them.
        """
        if cache not in ("keep", "recompute"):
            raise ValueError(f'cache must be "keep" or "recompute", got {cache!r}')
        if cache == "recompute" and not self._reads_again:
            config = self.engine.config
            raise ValueError(
                'cache="recompute" reads responses again with their prompts: make the engine with '
                f"max_read={config.max_prompt + config.max_response}, it has {config.max_read}"
            )
        self._hand_on(self._await_call())  # by the weights that it was begun with
        for holder in (*self._running.values(), *self._groups.values()):
            # the next token is drawn from logits that are there already
            if holder.logits_by is None:
                holder.logits_by = self.version
        self._params, self.version = params, version
        self._reader.load(params, version)
        if cache == "recompute":
            for slot, held in sorted(self._running.items(), key=lambda item: -item[1].order):
                if not held.ended:
                    self._put_back(slot)
        for group in self._groups.values():
            if cache == "recompute" or not group.residents:
                self._unload(group)  # and read again, by the new weights, when needed

    def close(self) -> DecodeState:
        """Gives up everything; returns the state, all of it free, for another scheduler."""
        for group_id in list(self._groups):
            self.abort(group_id)
        self._reader.forget()
        self._call, self._ended = None, []
        self._tell(0)
        return self._state

    # -- responses that are gone on with ----------------------------------------------------------

    def extend(self, group_id: int, sample: int, tokens: Sequence[int], limit: int) -> None:
        """Adds `tokens` (a tool's answer) to a held response and goes on with it.

        `limit`: longest response allowed, all that it holds included. ValueError where it is not
        held or nothing would be left to sample.
        """
        slot, held = self._held(group_id, sample)
        self._stalled = False
        before = held.partial.tokens
        fed = np.concatenate([before, np.asarray(tokens, np.int32)])
        if len(fed) >= limit or limit > self.engine.config.max_response:
            raise ValueError(
                f"a response of {len(before)} tokens with {len(tokens)} more leaves nothing to "
                f"sample: limit {limit}, and the engine's {self.engine.config.max_response}"
            )
        # the last token sampled has not been fed yet
        queue = [*map(int, before[-1:]), *map(int, tokens)]
        feeds = 0 < len(queue) <= self.engine.config.max_forced
        if not feeds:
            whole = len(held.partial.request.prompt.tokens) + len(fed)
            self.engine.check_length(whole, longest_read(self.engine.config))
        request = dataclasses.replace(held.partial.request, limit=limit)
        held.partial, held.logits_by = Partial(request, sample, fed), None
        held.tokens = len(fed)
        if feeds:
            held.ended = False
            self._give.append(Given(slot, queue, limit, len(fed)))
        else:
            self._put_back(slot)

    def release(self, group_id: int, sample: int) -> None:
        """Frees the slot of a held response."""
        slot, held = self._held(group_id, sample)
        self._leave(slot)
        self._end(held.group)

    def _held(self, group_id: int, sample: int) -> tuple[int, _Slot]:
        for slot, held in self._running.items():
            if held.group.id == group_id and held.partial.sample == sample and held.ended:
                return slot, held
        raise ValueError(f"response {sample} of request {group_id} is not held")

    # -- groups -----------------------------------------------------------------------------------

    def _check(self, request: GroupRequest, done: int = 0) -> None:
        config = self.engine.config
        self.engine.check_length(len(request.prompt.tokens))
        if done:
            self.engine.check_length(len(request.prompt.tokens) + done, longest_read(config))
        if not 1 <= request.limit <= config.max_response:
            raise ValueError(
                f"a response must be allowed 1 to {config.max_response} tokens, got {request.limit}"
            )
        if request.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {request.num_samples}")
        if not request.temperature >= 0 or request.top_k < 0 or not 0 < request.top_p <= 1:
            raise ValueError(
                "temperature and top_k must be at least 0 and top_p in (0, 1], got "
                f"{request.temperature}, {request.top_k} and {request.top_p}"
            )

    def _new_group(self, request, waiting, on_response) -> _Group:
        group = _Group(self._next_id, request, waiting, on_response, left=len(waiting))
        self._groups[group.id] = group
        self._next_id += 1
        return group

    def _push(self, group: _Group) -> None:
        request = group.request
        order = (-request.prompt.expected_length, -request.limit, group.id)
        heapq.heappush(self._heap, (*order, group))

    def _drop_waiting(self, group: _Group) -> None:
        group.waiting.clear()
        self._heap = [entry for entry in self._heap if entry[-1] is not group]
        heapq.heapify(self._heap)
        self._unload(group)

    def _end(self, group: _Group) -> None:
        """One of the group's responses is done with."""
        group.left -= 1
        self._settle(group)

    def _settle(self, group: _Group) -> None:
        if group.left == 0:
            self._unload(group)
            self._groups.pop(group.id, None)

    def _unload(self, group: _Group) -> None:
        """Forgets where the group's prompt is; it is read again when needed."""
        for resident in group.residents.values():
            if resident.held:
                resident.held = False
                self._unhold.append((resident.rank, resident.entry))
            self._free_entry(resident)
        group.residents, group.prefix, group.logits_by = {}, None, None

    def _free_entry(self, resident: _Resident) -> None:
        if not (resident.live or resident.held):
            self._entries[resident.rank].append(resident.entry)
            self._entries[resident.rank].sort(reverse=True)
            resident.entry = -1

    # -- slots ------------------------------------------------------------------------------------

    def _leave(self, slot: int, *, alive: bool = True) -> None:
        """Empties a slot. `alive`: the engine has still to be told."""
        held = self._running.pop(slot)
        self._stalled = False
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
        self._free[resident.rank].append(slot)
        self._free[resident.rank].sort(reverse=True)

    def _put_back(self, slot: int) -> None:
        """Empties a slot whose response goes on later, before all that is new."""
        held = self._running[slot]
        self._leave(slot)
        self._resumed.append((held.group, held.partial))

    def _tell(self, exit_below: int | None = None) -> None:
        """Hands the engine what has changed."""
        exit_below = self._exit_below if exit_below is None else exit_below
        if self._drop or self._unhold or self._give or exit_below != self._exit_below:
            self._state = self.engine.change(
                self._state,
                drop=self._drop,
                unhold=self._unhold,
                give=self._give,
                exit_below=exit_below,
            )
            self._drop, self._unhold, self._give = [], [], []
            self._exit_below = exit_below

    def _fill(self) -> None:
        """Puts waiting responses into slots while there are slots, pages and tokens to read."""
        # nothing runs: nobody waits for us to be done with reading
        rows = 1 if any(not s.ended for s in self._running.values()) else math.inf
        while any(self._free):
            if self._resumed:
                group, partial = self._resumed[-1]
                if rows <= 0 or not self._start_partial(group, partial):
                    return
                self._resumed.pop()
                rows -= 1
                continue
            if not self._heap:
                return
            group = self._heap[0][-1]
            if group.prefix is None:
                if rows <= 0:
                    return
                self._read()
                rows -= 1
            if not self._start_group(group):
                return
            if not group.waiting:
                heapq.heappop(self._heap)
                group.prefix = None

    def _read(self) -> None:
        """Reads the prompt of the next group, and of those after it that fit into the row."""
        waiting = [entry[-1] for entry in sorted(self._heap, key=lambda e: e[:-1])]
        waiting = [group for group in waiting if group.prefix is None]
        wanted = [(group.request.prompt.tokens, len(group.waiting)) for group in waiting]
        for index, prefix in self._reader.read_next(wanted, self.free_slots).items():
            waiting[index].prefix = prefix

    @property
    def _reads_again(self) -> bool:
        """Whether any response can be put back and gone on with."""
        config = self.engine.config
        return config.max_read >= config.max_prompt + config.max_response

    def _room(self, rank: int, tokens: int, slots: int, limit: int) -> bool:
        """Whether a data rank has pages for so many tokens of a prompt and slots that answer it.

        Where responses can be read again, for a page of every slot: if one wants another and there
        is none, the last in is put back. Else for the longest that they may become.
        """
        size = self.engine.config.page_size
        running = [s for s in self._running.values() if s.resident.rank == rank]
        if not running and slots == 1:
            return True  # the cache holds one of any size
        need = pages_of(tokens, size)
        if self._reads_again:
            return self._pages[rank] >= need + slots + len(running)
        for held in running:
            own = held.tokens - held.admitted
            most = held.partial.request.limit - held.admitted
            need += pages_of(most, size) - pages_of(max(0, own - 1), size)
        return self._pages[rank] >= need + slots * pages_of(limit, size)

    def _start_group(self, group: _Group) -> bool:
        """Starts responses of a group on the data rank with the most free slots, or says no."""
        order = sorted(range(len(self._free)), key=lambda r: (-len(self._free[r]), r))
        for rank in order:
            resident = group.residents.get(rank)
            again = resident is None or not resident.members  # once more, where all have a reader
            places = self.engine.width if again else len(resident.members)
            count = min(len(group.waiting), len(self._free[rank]), places)
            length = len(group.request.prompt.tokens) if again else 0
            while count and not self._room(rank, length, count, group.request.limit):
                count -= 1
            if count:
                partials = [
                    Partial(group.request, group.waiting.pop(), np.zeros(0, np.int32))
                    for _ in range(count)
                ]
                self._admit(group, group.prefix, rank, partials, shared=True)
                return True
        return False

    def _start_partial(self, group: _Group, partial: Partial) -> bool:
        """Reads what a response has so far and goes on with it."""
        tokens = np.concatenate([group.request.prompt.tokens, partial.tokens]).astype(np.int32)
        order = sorted(range(len(self._free)), key=lambda r: (-len(self._free[r]), r))
        for rank in order:
            limit = partial.request.limit - len(partial.tokens)
            if self._free[rank] and self._room(rank, len(tokens), 1, limit):
                prefix = self._reader.read(tokens)
                self._admit(group, prefix, rank, [partial], shared=False)
                return True
        return False

    def _admit(
        self,
        group: _Group,
        prefix: Prefix,
        rank: int,
        partials: Sequence[Partial],
        *,
        shared: bool,
    ) -> None:
        if self._unhold:  # of an entry that may be taken now
            self._tell()
        resident = group.residents.get(rank) if shared else None
        new = resident is None or not resident.members
        if new:
            if resident is not None and resident.held:
                resident.held = False
                self._unhold.append((rank, resident.entry))
            members = list(range(self.engine.width - 1, -1, -1))
            resident = _Resident(rank, self._entries[rank].pop(), members)
            self._pages[rank] -= pages_of(int(prefix.length), self.engine.config.page_size)
        slots, members, requests = [], [], []
        for partial in partials:
            request, slot, member = partial.request, self._free[rank].pop(), resident.members.pop()
            slots.append(slot)
            members.append(member)
            requests.append(
                SlotRequest(
                    request.prompt.counter,
                    partial.sample,
                    request.limit,
                    request.temperature,
                    request.top_k,
                    request.top_p,
                    emitted=len(partial.tokens),
                    keep=request.hold,
                )
            )
            done = len(partial.tokens)
            self._running[slot] = _Slot(group, partial, resident, member, self._order, done, done)
            if shared:
                self._running[slot].logits_by = group.logits_by
            self._order += 1
        resident.live += len(slots)
        resident.held = shared and bool(group.waiting)
        if shared:
            group.residents[rank] = resident
        options = {"entry": resident.entry, "members": members, "hold": resident.held}
        if new:
            self._state, _ = self.engine.start(prefix, self._state, slots, requests, **options)
        else:
            self._state = self.engine.join(prefix, self._state, slots, requests, **options)
        if not resident.held and shared:
            for other in group.residents.values():
                if other.held:  # its last responses went elsewhere
                    other.held = False
                    self._unhold.append((other.rank, other.entry))

    # -- decode calls -----------------------------------------------------------------------------

    def _begin_call(self) -> None:
        """Fills slots and begins a decode call, where there is anything to decode."""
        self._tell()
        self._fill()
        going = {slot: held for slot, held in self._running.items() if not held.ended}
        # with work waiting, come back as soon as enough slots for a group are free
        waits = bool(self._heap or self._resumed)
        self._stalled = waits and not going
        if not going:
            return
        self._tell(max(0, len(going) - self.engine.width) if waits else 0)
        self._state, result = self.engine.generate(self._params, self._state, few=self._few())
        result.copy_to_host_async()
        self._call = _Call(result, self.version, going)
        self.stats.generate_calls += 1

    def _await_call(self) -> _Call | None:
        """Waits for the call under way, and frees the slots and pages of what has ended in it."""
        call, self._call = self._call, None
        if call is None:
            return None
        host = call.result.convert_to_numpy()
        goes_on, counts = host.active(), host.counts()
        free, slots = host.free_pages(), self.engine.shapes.slots
        self._pages = [int(n) for n in free[::slots]]
        moved = set()
        # without those that were given up meanwhile
        there = {s: held for s, held in call.slots.items() if self._running.get(s) is held}
        for slot, held in sorted(there.items()):
            held.tokens += int(counts[slot])
            if counts[slot] or not goes_on[slot]:
                moved.add(held.resident.rank)
            if not goes_on[slot]:
                held.ended = True
                if not held.partial.request.hold:
                    self._leave(slot, alive=False)
        for rank in range(self.engine.shapes.ranks):
            self._unblock(rank, moved)
        return _Call(host, call.version, there)

    def _hand_on(self, call: _Call | None) -> None:
        """Adds the tokens of a call to their responses, and hands on those that have ended."""
        if call is None:
            return
        host, ended = call.result, []
        logp, margin, counts = host.logp(), host.margin(), host.counts()
        guesses = host.speculation()
        for slot, held in sorted(call.slots.items()):
            count = int(counts[slot])
            self.stats.tokens += count
            if guesses.shape[1]:
                self.stats.proposed += int(guesses[slot, 0])
                self.stats.accepted += int(guesses[slot, 1])
            if count:
                version = np.full(count, call.version, np.int32)
                if held.logits_by is not None:
                    version[0], held.logits_by = held.logits_by, None
                tokens = host.get_result_at_slot(slot).tokens[0, :count]
                part = (tokens, logp[slot, :count], margin[slot, :count], version)
                held.partial.parts.append(part)
            if held.ended:
                ended.append((held, held.partial.response(self._stops)))
                if not held.partial.request.hold:
                    self._end(held.group)
        self._ended += [(held.group.id, response) for held, response in ended]
        for held, response in ended:
            if held.group.on_response is not None:
                held.group.on_response(response)

    def _few(self) -> bool:
        """Whether so few responses run that the engine has a smaller program for them."""
        running = [0] * self.engine.shapes.ranks
        for held in self._running.values():
            running[held.resident.rank] += not held.ended
        return max(running) <= self.engine.few_slots

    def _unblock(self, rank: int, moved: set[int]) -> None:
        """Puts the last response in back where all of a rank wait for a page."""
        stuck = [
            (held.order, slot)
            for slot, held in self._running.items()
            if held.resident.rank == rank and not held.ended
        ]
        if stuck and rank not in moved and self._pages[rank] == 0:
            self.stats.preempted += 1
            self._put_back(max(stuck)[1])


def run_requests(
    engine: RolloutEngine,
    params: Any,
    state: DecodeState,
    requests: Sequence[GroupRequest],
    *,
    version: int = 0,
    on_response: Callable[[Response], None] | None = None,
) -> tuple[DecodeState, list[Response], RolloutStats]:
    """Decodes all requests; responses come back ordered by (request, sample).

    All slots of `state` must be free; it is donated and comes back free. Responses take slots as
    they fall free, longest expected first, then longest limit. `on_response` is called as soon as a
    response ends.
    """
    scheduler = Scheduler(engine, params, version=version, state=state)
    done: dict[tuple[int, int], Response] = {}

    def keep(index, response):
        done[index, response.sample] = response
        if on_response is not None:
            on_response(response)

    for index, request in enumerate(requests):
        scheduler.submit(request, lambda response, index=index: keep(index, response))
    while scheduler.busy:
        scheduler.step()
    return scheduler.close(), [done[key] for key in sorted(done)], scheduler.stats
