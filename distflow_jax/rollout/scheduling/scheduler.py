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

from distflow_jax.rollout.decode_state import DecodeState, longest_read
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.engine.slot_commands import Given
from distflow_jax.rollout.requests import GroupRequest, Partial, Response, RolloutStats
from distflow_jax.rollout.scheduling.prefill_batches import PromptReader
from distflow_jax.rollout.scheduling.slots import Call, Group, Slot, Slots


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
        self._stops = frozenset(engine.stop_ids)
        self._slots = Slots(engine, engine.init_decode_state() if state is None else state)
        self._groups: dict[int, Group] = {}
        self._heap: list[tuple[Any, ...]] = []  # groups with responses that wait, in their order
        self._resumed: list[tuple[Group, Partial]] = []  # before all that is new; the next last
        self._ended: list[tuple[int, Response]] = []  # by group, that `step` has to return yet
        self._reader = PromptReader(engine, params, version, self.stats)
        self._next_id = 0
        self._paused = self._stalled = False

    # -- what is wanted ---------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a response waits, runs, or is yet to be returned by `step`.

        Those that were returned and are held do not count.
        """
        waits = self._heap or self._resumed or self._ended
        return bool(waits or self._slots.going())

    @property
    def stalled(self) -> bool:
        """Whether what waits finds no room beside responses that are held: `step` does nothing
        until one of these is gone on with or released."""
        return self._stalled

    @property
    def free_slots(self) -> int:
        """Slots that no response holds."""
        return sum(map(len, self._slots.free))

    def under_way(self) -> Iterator[tuple[int, Partial]]:
        """(id of its group, what has come of it so far) of each response that has begun."""
        for held in self._slots.going().values():
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
        samples = list(reversed(request.samples))
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
        if self._slots.call is None:
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
        for slot, held in sorted(self._slots.running.items()):
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
        for slot, held in sorted(self._slots.running.items()):
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
        for slot, held in sorted(self._slots.running.items(), key=lambda item: item[1].order):
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
        if cache == "recompute" and not self._slots.reads_again:
            config = self.engine.config
            raise ValueError(
                'cache="recompute" reads responses again with their prompts: make the engine with '
                f"max_read={config.max_prompt + config.max_response}, it has {config.max_read}"
            )
        self._hand_on(self._await_call())  # by the weights that it was begun with
        for holder in (*self._slots.running.values(), *self._groups.values()):
            # the next token is drawn from logits that are there already
            if holder.logits_by is None:
                holder.logits_by = self.version
        self._params, self.version = params, version
        self._reader.load(params, version)
        if cache == "recompute":
            for slot, held in sorted(self._slots.running.items(), key=lambda item: -item[1].order):
                if not held.ended:
                    self._put_back(slot)
        for group in self._groups.values():
            if cache == "recompute" or not group.residents:
                self._slots.unload(group)  # and read again, by the new weights, when needed

    def close(self) -> DecodeState:
        """Gives up everything; returns the state, all of it free, for another scheduler."""
        for group_id in list(self._groups):
            self.abort(group_id)
        self._reader.forget()
        self._slots.call, self._ended = None, []
        self._slots.tell(0)
        return self._slots.state

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
            self._slots.give(Given(slot, queue, limit, len(fed)))
        else:
            self._put_back(slot)

    def release(self, group_id: int, sample: int) -> None:
        """Frees the slot of a held response."""
        slot, held = self._held(group_id, sample)
        self._leave(slot)
        self._end(held.group)

    def _held(self, group_id: int, sample: int) -> tuple[int, Slot]:
        for slot, held in self._slots.running.items():
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

    def _new_group(self, request, waiting, on_response) -> Group:
        group = Group(self._next_id, request, waiting, on_response, left=len(waiting))
        self._groups[group.id] = group
        self._next_id += 1
        return group

    def _push(self, group: Group) -> None:
        heapq.heappush(self._heap, (*group.turn, group))

    def _drop_waiting(self, group: Group) -> None:
        group.waiting.clear()
        self._heap = [entry for entry in self._heap if entry[-1] is not group]
        heapq.heapify(self._heap)
        self._slots.unload(group)

    def _end(self, group: Group) -> None:
        """One of the group's responses is done with."""
        group.left -= 1
        self._settle(group)

    def _settle(self, group: Group) -> None:
        if group.left == 0:
            self._slots.unload(group)
            self._groups.pop(group.id, None)

    # -- slots ------------------------------------------------------------------------------------

    def _leave(self, slot: int) -> Slot:
        """Empties a slot."""
        self._stalled = False
        return self._slots.leave(slot)

    def _put_back(self, slot: int) -> None:
        """Empties a slot whose response goes on later, before all that is new."""
        held = self._leave(slot)
        self._resumed.append((held.group, held.partial))

    def _fill(self) -> None:
        """Puts waiting responses into slots while there are slots, pages and tokens to read."""
        # nothing runs: nobody waits for us to be done with reading
        rows = 1 if self._slots.going() else math.inf
        while self.free_slots:
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
            if not self._slots.start_group(group):
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

    def _start_partial(self, group: Group, partial: Partial) -> bool:
        """Reads what a response has so far and goes on with it."""
        tokens = np.concatenate([group.request.prompt.tokens, partial.tokens]).astype(np.int32)
        for rank in self._slots.ranks():
            limit = partial.request.limit - len(partial.tokens)
            if self._slots.free[rank] and self._slots.room(rank, len(tokens), 1, limit):
                prefix = self._reader.read(tokens)
                self._slots.admit(group, prefix, rank, [partial], shared=False)
                return True
        return False

    # -- decode calls -----------------------------------------------------------------------------

    def _begin_call(self) -> None:
        """Fills slots and begins a decode call, where there is anything to decode."""
        self._slots.tell()
        self._fill()
        going = len(self._slots.going())
        # with work waiting, come back as soon as enough slots for a group are free
        waits = bool(self._heap or self._resumed)
        self._stalled = waits and not going
        if going:
            self._slots.tell(max(0, going - self.engine.width) if waits else 0)
            self._slots.begin_call(self._params, self.version)
            self.stats.generate_calls += 1

    def _await_call(self) -> Call | None:
        """The call under way when it is done; who waits for a page in vain has been put back."""
        if (done := self._slots.await_call()) is None:
            return None
        call, stuck = done
        for slot in stuck:
            self.stats.preempted += 1
            self._put_back(slot)
        return call

    def _hand_on(self, call: Call | None) -> None:
        """Adds the tokens of a call to their responses, and hands on those that have ended."""
        if call is None:
            return
        host, ended = call.result, []
        logp, margin, counts = host.logp(), host.margin(), host.counts()
        guesses = host.speculation()
        for slot, held in call.slots.items():
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
                recorded, held.recorded = held.recorded, None
                experts = None if recorded is None else recorded.read()
                ended.append((held, held.partial.response(self._stops, experts)))
                if not held.partial.request.hold:
                    self._end(held.group)
        self._ended += [(held.group.id, response) for held, response in ended]
        for held, response in ended:
            if held.group.on_response is not None:
                held.group.on_response(response)


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
