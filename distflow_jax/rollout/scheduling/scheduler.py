"""Continuous batching: which sequence runs in which slot, and when a slot is refilled.

A sequence is waiting, running, preempted, resumed or held: see sequences.py. The order depends on
what was submitted when, and on what was sampled, never on time: a rerun, and every process that
shares an engine, schedules alike.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distflow_jax.images.turn_images import TurnImages, joined
from distflow_jax.rollout.decode_state import DecodeState, check_length, longest_read
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.engine.slot_updates import Injection
from distflow_jax.rollout.occupancy import OccupancyClock
from distflow_jax.rollout.requests import GroupRequest, Partial, Response, RolloutStats
from distflow_jax.rollout.scheduling.sequences import RequestGroup, SlotSequence
from distflow_jax.rollout.scheduling.step_loop import StepLoop


class Scheduler:
    """Drives one engine: submit requests, call `step` until nothing is `busy`.

    `held` extends and releases sequences of requests with `hold`. One thread at a time. Where
    several processes share the engine all make the same calls.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        params: Any,
        *,
        version: int = 0,
        state: DecodeState | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        """`state`: all slots free; a new one by default. It is donated. `now`: a clock of seconds
        for `stats.occupancy`."""
        state = engine.init_decode_state() if state is None else state
        self.engine = engine
        clock = OccupancyClock(engine.shapes.lanes * engine.shapes.ranks, now)
        self._loop = StepLoop(engine, params, version, state, clock)
        self.held, self.stats = HeldSequences(self._loop), self._loop.stats
        self._next_id = 0
        self._paused = False

    @property
    def version(self) -> int:
        """Training steps that the weights have seen."""
        return self._loop.version

    @property
    def busy(self) -> bool:
        """Whether a sequence is waiting or running, or a response is yet to be returned by `step`.

        Held sequences do not count.
        """
        loop = self._loop
        return bool(loop.waiting or loop.ended or loop.slots.going_on())

    @property
    def stalled(self) -> bool:
        """Whether waiting sequences find no room beside held ones: `step` does nothing until one of
        these is extended or released."""
        return self._loop.stalled

    @property
    def free_slots(self) -> int:
        """Slots without a sequence."""
        return self._loop.free_slots

    def under_way(self) -> Iterator[tuple[int, Partial]]:
        """(id of its group, its tokens so far) of each sequence that has begun and not ended."""
        for slot in self._loop.slots.going_on():
            sequence = self._loop.slots.sequences[slot]
            yield sequence.group.id, sequence.partial
        for group, partial in reversed(self._loop.waiting.resumed()):
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
        self._loop.waiting.push(group)
        return group.id

    def step(self) -> list[Response]:
        """One round: waits for the decode call in flight, reads prompts for free slots and fills
        these, begins the next call; returns what had ended in the one before."""
        if self._paused or not self.busy:
            return []
        self._loop.decode_round()
        ended, self._loop.ended = self._loop.ended, []
        return [response for _, response in ended]

    def abort(self, group_id: int) -> list[Response]:
        """Aborts a request; returns those of its responses that `step` has not returned, cut where
        they were."""
        loop = self._loop
        cut = [response for index, response in loop.ended if index == group_id]
        loop.ended = [entry for entry in loop.ended if entry[0] != group_id]
        group = loop.groups.get(group_id)
        if group is None:
            return cut
        cut += [p.response(loop.stops) for p in loop.waiting.remove_resumed(group)]
        for slot, sequence in sorted(loop.slots.sequences.items()):
            if sequence.group is group:
                if slot not in loop.slots.held:
                    cut.append(sequence.partial.response(loop.stops))
                loop.vacate(slot)
        loop.parked = {key: s for key, s in loop.parked.items() if s.group is not group}
        loop.drop_waiting(group)
        loop.finish(group, group.left)
        return cut

    def abort_sample(self, group_id: int, sample: int) -> None:
        """Aborts one sequence that has begun; the rest of its group goes on.

        ValueError where it has not begun, or is done.
        """
        for slot, sequence in sorted(self._loop.slots.sequences.items()):
            if sequence.group.id == group_id and sequence.partial.sample == sample:
                self._loop.vacate(slot)
                self._loop.finish(sequence.group)
                return
        if parked := self._loop.parked.pop((group_id, sample), None):
            self._loop.finish(parked.group)
            return
        group = self._loop.groups.get(group_id)
        if group is None or not self._loop.waiting.remove_resumed(group, sample):
            raise ValueError(f"response {sample} of request {group_id} is not under way")
        self._loop.finish(group)

    def pause(self) -> None:
        """`step` does nothing until `resume`; caches are kept."""
        self._paused = True

    def resume(self) -> None:
        """Continues after `pause`."""
        self._paused = False

    def export(self) -> list[Partial]:
        """All sequences that are waiting or running, in their order, with their tokens so far.

        The scheduler is empty then, but for held sequences and responses that `step` has still to
        return.
        """
        loop, partials = self._loop, []
        loop.drain()
        for slot, sequence in sorted(loop.slots.sequences.items(), key=lambda i: i[1].order):
            if slot not in loop.slots.held:
                partials.append(sequence.partial)
                loop.vacate(slot)
                loop.finish(sequence.group)
        while loop.waiting.next_resumed:
            group, partial = loop.waiting.pop_resumed()
            partials.append(partial)
            loop.finish(group)
        nothing = np.zeros(0, np.int32)
        for group in loop.waiting.groups():
            partials += [Partial(group.request, s, nothing) for s in reversed(group.waiting)]
            count = len(group.waiting)
            loop.drop_waiting(group)
            loop.finish(group, count)
        return partials

    def restore(
        self, partials: Sequence[Partial], on_response: Callable[[Response], None] | None = None
    ) -> None:
        """Resumes exported sequences before all that wait: their tokens are read again."""
        for partial in partials:
            self._check(partial.request, len(partial.tokens))
        for partial in reversed(partials):
            group = self._new_group(partial.request, [], on_response)
            group.left = 1
            self._loop.waiting.push_resumed(group, partial)

    def drain(self) -> None:
        """Waits for the decode call in flight: no program uses the weights until `step`."""
        self._loop.drain()

    def load(self, params: Any, version: int, *, cache: str = "keep") -> None:
        """Swaps the weights between two calls.

        `cache`: "keep" the keys and values of sequences that have begun, or "recompute" them. What
        is parked is read by the weights there are when it goes on, with either.
        """
        if cache not in ("keep", "recompute"):
            raise ValueError(f'cache must be "keep" or "recompute", got {cache!r}')
        loop, slots = self._loop, self._loop.slots
        if cache == "recompute" and not slots.can_preempt:
            config = self.engine.config
            raise ValueError(
                'cache="recompute" reads responses again with their prompts: make the engine with '
                f"max_read={config.max_prompt + config.max_response - 1}, it has {config.max_read}"
            )
        loop.load(params, version)
        if cache == "recompute":
            for slot in list(slots.held):
                loop.park(slot)
            for slot, _ in sorted(slots.sequences.items(), key=lambda i: -i[1].order):
                loop.preempt(slot)
        for group in loop.groups.values():
            if cache == "recompute" or not group.cached:
                slots.prompts.unload(group)  # and read again, by the new weights, when needed

    def close(self) -> DecodeState:
        """Aborts everything; returns the state, all of it free, for another scheduler."""
        for group_id in list(self._loop.groups):
            self.abort(group_id)
        self._loop.prefill.clear()
        self._loop.ended = []
        calls = self._loop.slots.calls
        calls.in_flight = None
        calls.flush(0)
        return calls.state

    def _check(self, request: GroupRequest, done: int = 0) -> None:
        """ValueError for a request that no slot can take; `done`: tokens that it has already."""
        config, limit = self.engine.config, request.sampling.limit
        check_length(len(request.prompt.tokens), config.max_prompt)
        if not 0 <= request.begun < len(request.prompt.tokens):
            raise ValueError(
                f"of a prompt of {len(request.prompt.tokens)} tokens at least one is no part of "
                f"the response, got begun={request.begun}"
            )
        if done:
            check_length(len(request.prompt.tokens) + done, longest_read(config))
        if limit > config.max_response:
            raise ValueError(
                f"a response must be allowed 1 to {config.max_response} tokens, got {limit}"
            )

    def _new_group(
        self,
        request: GroupRequest,
        waiting: list[int],
        on_response: Callable[[Response], None] | None,
    ) -> RequestGroup:
        group = RequestGroup(self._next_id, request, waiting, on_response, left=len(waiting))
        self._loop.groups[group.id] = group
        self._next_id += 1
        return group


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


class HeldSequences:
    """Extends and releases sequences of requests with `GroupRequest.hold`."""

    def __init__(self, loop: StepLoop):
        self._loop = loop

    def extend(
        self,
        group_id: int,
        sample: int,
        tokens: Sequence[int],
        limit: int,
        shown: TurnImages | None = None,
    ) -> None:
        """Adds `tokens` (a tool's answer) to a held sequence and runs it again.

        `limit`: longest response allowed, in tokens, earlier turns included. `shown`: images among
        the tokens; the sequence is then read again with its prompt, as after a long answer. Raises
        ValueError where the sequence is not held or nothing would be left to sample.
        """
        slot, sequence = self._find(group_id, sample)
        config = self._loop.engine.config
        self._loop.stalled = False
        before = sequence.partial.tokens
        fed = np.concatenate([before, np.asarray(tokens, np.int32)])
        if len(fed) >= limit or limit > config.max_response:
            raise ValueError(
                f"a response of {len(before)} tokens with {len(tokens)} more leaves nothing to "
                f"sample: limit {limit}, and the engine's {config.max_response}"
            )
        # the last token sampled has not been fed yet
        queue = [*map(int, before[-1:]), *map(int, tokens)]
        # a slot is fed ids alone
        fits = slot is not None and 0 < len(queue) <= config.max_forced and shown is None
        if not fits:
            whole = len(sequence.partial.request.prompt.tokens) + len(fed)
            check_length(whole, longest_read(config))
        request = sequence.partial.request.with_limit(limit)
        images = joined([(len(before), sequence.partial.shown), (len(tokens), shown)])
        sequence.partial, sequence.logits_by = Partial(request, sample, fed, shown=images), None
        sequence.tokens = len(fed)
        self._loop.look()
        if slot is None:
            del self._loop.parked[group_id, sample]
            self._loop.waiting.push_returned(sequence.group, sequence.partial)
        elif fits:
            begun = request.begun
            injection = Injection(slot, queue, begun + limit, begun + len(fed))
            self._loop.slots.put_back(injection)
        else:
            self._loop.vacate(slot)
            self._loop.waiting.push_returned(sequence.group, sequence.partial)

    def release(self, group_id: int, sample: int) -> None:
        """Frees the slot of a held sequence. Raises ValueError where it is not held."""
        slot, sequence = self._find(group_id, sample)
        if slot is None:
            del self._loop.parked[group_id, sample]
        else:
            self._loop.vacate(slot)
        self._loop.finish(sequence.group)

    def _find(self, group_id: int, sample: int) -> tuple[int | None, SlotSequence]:
        """(its slot, a held sequence); None: it is parked."""
        if (parked := self._loop.parked.get((group_id, sample))) is not None:
            return None, parked
        for slot, sequence in self._loop.slots.held.items():
            if sequence.group.id == group_id and sequence.partial.sample == sample:
                return slot, sequence
        raise ValueError(f"response {sample} of request {group_id} is not held")
