"""The scheduler's records: groups of sequences, prompts in the cache, sequences in slots, calls.

A sequence is one response and its state. It is waiting for a slot, running in one, preempted (back
among the waiting, because the cache was full or the weights were swapped), resumed before all that
is new, or held: ended, and still in its slot. A held sequence is parked where others need its slot
or its pages, and returning once it has tokens to read and waits for a lane.
"""

import collections
import dataclasses
import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from distflow_jax.rollout.engine.result_tokens import RolloutTokens
from distflow_jax.rollout.prefill.prefill import Prefix
from distflow_jax.rollout.requests import GroupRequest, Partial, Response
from distflow_jax.rollout.scheduling.sampling_order import longest


@dataclasses.dataclass
class CachedPrompt:
    """A prompt in the cache of one data rank, read by up to `RolloutEngine.width` slots."""

    rank: int
    entry: int  # in the rank's table of prompts; -1: evicted
    members: list[int]  # numbers that no slot has, the next one last
    pages: int  # that it takes
    pinned: bool = False  # stays without a slot: sequences that need it are waiting
    readers: int = 0  # slots that attend to it


@dataclasses.dataclass
class RequestGroup:
    """A request's sequences that are waiting, and where its prompt is cached."""

    id: int
    request: GroupRequest
    waiting: list[int]  # samples, the next one last
    on_response: Callable[[Response], None] | None = None
    prefix: Prefix | None = None  # of the prompt; kept while sequences are waiting
    cached: dict[int, CachedPrompt] = dataclasses.field(default_factory=dict)  # by data rank
    left: int = 0  # sequences that are waiting or in slots
    logits_by: int | None = None  # version that read the prefix; None: the present one

    @property
    def priority(self) -> tuple[float, ...]:
        """Lowest first: turn, rank (longest expected response, longest limit), order of arrival."""
        request = self.request
        rank = longest(request) if request.rank is None else request.rank
        return (request.turn, *rank, self.id)


@dataclasses.dataclass
class SlotSequence:
    """A sequence in a slot: running, or held."""

    group: RequestGroup
    partial: Partial
    prompt: CachedPrompt
    member: int  # number among the slots that share the prompt
    order: int  # of admission: the last one admitted is the first to be preempted
    admitted: int  # tokens of the response on admission
    tokens: int  # tokens of the response now; those of the last call reach `partial` later
    ended: bool = False
    logits_by: int | None = None  # version that its next token is drawn by; None: the present one
    unfed: bool = False  # whether a token is to be fed before the next one is drawn
    recorded: "RecordedExperts | None" = None  # experts of an ended response


class RecordedExperts(NamedTuple):
    """Experts that tokens went through: one row of the result of RolloutEngine.collect."""

    experts: jax.Array
    row: int

    def read(self) -> np.ndarray:
        """Waits for the transfer to the host; [T, layers, experts of a token]."""
        return np.asarray(self.experts)[self.row]


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    """A decode call: in flight, then done."""

    result: RolloutTokens
    version: int
    running: dict[int, SlotSequence]  # by slot, when the call began


class WaitingQueue:
    """Resumed sequences, the last one preempted first, and a heap of groups by priority."""

    def __init__(self):
        self._resumed: collections.deque[tuple[RequestGroup, Partial]] = (
            collections.deque()
        )  # next last
        self._heap: list[tuple[Any, ...]] = []

    def __bool__(self) -> bool:
        return bool(self._resumed or self._heap)

    def resumed(self) -> list[tuple[RequestGroup, Partial]]:
        """Sequences that go on with tokens that they have, the next first."""
        return list(reversed(self._resumed))

    def groups(self) -> list[RequestGroup]:
        """Groups with sequences that have not begun, by priority."""
        return [entry[-1] for entry in sorted(self._heap, key=lambda e: e[:-1])]

    def push(self, group: RequestGroup) -> None:
        """Adds a group."""
        heapq.heappush(self._heap, (*group.priority, group))

    def push_resumed(self, group: RequestGroup, partial: Partial) -> None:
        """Adds a sequence before all others."""
        self._resumed.append((group, partial))

    def push_returned(self, group: RequestGroup, partial: Partial) -> None:
        """Adds a sequence behind those that are resumed, before new groups."""
        self._resumed.appendleft((group, partial))

    @property
    def count(self) -> int:
        """Sequences that wait."""
        return len(self._resumed) + sum(len(entry[-1].waiting) for entry in self._heap)

    @property
    def next_resumed(self) -> tuple[RequestGroup, Partial] | None:
        """The resumed sequence that is admitted next."""
        return self._resumed[-1] if self._resumed else None

    @property
    def next_group(self) -> RequestGroup | None:
        """The group of highest priority."""
        return self._heap[0][-1] if self._heap else None

    def pop_resumed(self) -> tuple[RequestGroup, Partial]:
        """Removes the next resumed sequence."""
        return self._resumed.pop()

    def pop_group(self) -> RequestGroup:
        """Removes the group of highest priority."""
        return heapq.heappop(self._heap)[-1]

    def remove_resumed(self, group: RequestGroup, sample: int | None = None) -> list[Partial]:
        """Removes a group's resumed sequences (or one of them); returns them, the next first."""
        removed = [
            partial
            for of_group, partial in self.resumed()
            if of_group is group and sample in (None, partial.sample)
        ]
        kept = [e for e in self._resumed if not any(e[1] is p for p in removed)]
        self._resumed = collections.deque(kept)
        return removed

    def remove_group(self, group: RequestGroup) -> None:
        """Removes a group and empties its list of sequences that have not begun."""
        group.waiting.clear()
        self._heap = [entry for entry in self._heap if entry[-1] is not group]
        heapq.heapify(self._heap)
