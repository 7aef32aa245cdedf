"""Sequences that wait for a slot: resumed ones first, then those of new groups by priority."""

import collections
import heapq
from typing import Any

from distflow_jax.rollout.requests import Partial
from distflow_jax.rollout.scheduling.sequences import Group


class WaitingQueue:
    """Resumed sequences, the last one preempted first, and a heap of groups by priority."""

    def __init__(self):
        self._resumed: collections.deque[tuple[Group, Partial]] = collections.deque()  # next last
        self._heap: list[tuple[Any, ...]] = []

    def __bool__(self) -> bool:
        return bool(self._resumed or self._heap)

    def resumed(self) -> list[tuple[Group, Partial]]:
        """Sequences that go on with tokens that they have, the next first."""
        return list(reversed(self._resumed))

    def groups(self) -> list[Group]:
        """Groups with sequences that have not begun, by priority."""
        return [entry[-1] for entry in sorted(self._heap, key=lambda e: e[:-1])]

    def push(self, group: Group) -> None:
        """Adds a group."""
        heapq.heappush(self._heap, (*group.priority, group))

    def push_resumed(self, group: Group, partial: Partial) -> None:
        """Adds a sequence before all others."""
        self._resumed.append((group, partial))

    def push_returned(self, group: Group, partial: Partial) -> None:
        """Adds a sequence behind those that are resumed, before new groups."""
        self._resumed.appendleft((group, partial))

    @property
    def count(self) -> int:
        """Sequences that wait."""
        return len(self._resumed) + sum(len(entry[-1].waiting) for entry in self._heap)

    @property
    def next_resumed(self) -> tuple[Group, Partial] | None:
        """The resumed sequence that is admitted next."""
        return self._resumed[-1] if self._resumed else None

    @property
    def next_group(self) -> Group | None:
        """The group of highest priority."""
        return self._heap[0][-1] if self._heap else None

    def pop_resumed(self) -> tuple[Group, Partial]:
        """Removes the next resumed sequence."""
        return self._resumed.pop()

    def pop_group(self) -> Group:
        """Removes the group of highest priority."""
        return heapq.heappop(self._heap)[-1]

    def remove_resumed(self, group: Group, sample: int | None = None) -> list[Partial]:
        """Removes a group's resumed sequences (or one of them); returns them, the next first."""
        removed = [
            partial
            for of_group, partial in self.resumed()
            if of_group is group and sample in (None, partial.sample)
        ]
        kept = [e for e in self._resumed if not any(e[1] is p for p in removed)]
        self._resumed = collections.deque(kept)
        return removed

    def remove_group(self, group: Group) -> None:
        """Removes a group and empties its list of sequences that have not begun."""
        group.waiting.clear()
        self._heap = [entry for entry in self._heap if entry[-1] is not group]
        heapq.heapify(self._heap)
