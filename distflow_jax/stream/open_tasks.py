"""The open tasks of a process, with indices over them.

Holders, waiting order and lease expiry are indexed: a request from a worker costs the logarithm of
the number of tasks, plus a move of pointers in one sorted list.
"""

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from distflow_jax.stream.tasks import SAMPLER, Key, OpenTask

_Entry = tuple[tuple[Any, ...], Key]  # priority, key


class OpenTasks(Mapping[Key, OpenTask]):
    """Open tasks by key. Leases begin, continue and end here only.

    Attributes:
      num_waiting: tasks without a holder, by node; groups are under SAMPLER.
    """

    def __init__(self) -> None:
        self.num_waiting: Counter[str] = Counter()
        self._tasks: dict[Key, OpenTask] = {}
        self._by_node: dict[str, dict[Key, OpenTask]] = {}
        self._held: dict[str, dict[Key, OpenTask]] = {}  # by worker
        self._waiting: dict[str, dict[int, list[_Entry]]] = {}  # by node and step, sorted
        self._entries: dict[Key, _Entry] = {}  # of the tasks that wait
        self._ends: list[tuple[float, Key]] = []  # a heap: when to look at a lease
        self._watched: set[Key] = set()  # of that heap

    def __getitem__(self, key: Key) -> OpenTask:
        return self._tasks[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: OpenTask) -> None:
        """Adds a task that nobody holds."""
        self._tasks[task.key] = task
        self._by_node.setdefault(task.node, {})[task.key] = task
        self._put(task)

    def remove(self, key: Key) -> None:
        """Takes a task out, whoever holds it."""
        task = self._tasks.pop(key)
        del self._by_node[task.node][task.key]
        self._take(task)

    def lease(
        self, task: OpenTask, worker: str, now: float, seconds: float, calls: float = 0.0
    ) -> None:
        """Begins a lease of a task, or prolongs it; `calls` as of GroupTask.lease."""
        self._take(task)
        task.lease(worker, now, seconds, calls)
        self._held.setdefault(worker, {})[task.key] = task
        if task.key not in self._watched and math.isfinite(task.until):
            self._watch(task)

    @property
    def nodes(self) -> list[str]:
        """Nodes that have open tasks, without those of SAMPLER."""
        return sorted(node for node, of in self._by_node.items() if of and node not in SAMPLER)

    def free(self, task: OpenTask) -> None:
        """Ends the lease of a task: it waits again."""
        self._take(task)
        task.free()
        self._put(task)

    def moved(self, task: OpenTask) -> None:
        """Notes that a task may have another priority."""
        if task.key in self._entries:
            self._take(task)
            self._put(task)

    def held(self, worker: str) -> list[OpenTask]:
        """The tasks that a worker holds."""
        return list(self._held.get(worker, {}).values())

    def of_node(self, node: str) -> Collection[Any]:
        """The tasks of a node."""
        return self._by_node.get(node, {}).values()

    def queues(self, nodes: Iterable[str] = SAMPLER) -> list[tuple[str, int]]:
        """Nodes and steps of the tasks of some nodes that wait, the earliest step first."""
        found = [(step, node) for node in nodes for step in self._waiting.get(node, ())]
        return [(node, step) for step, node in sorted(found)]

    def waiting(
        self, queues: Sequence[tuple[str, int]], *, backwards: bool = False
    ) -> Iterator[OpenTask]:
        """Tasks of some of `queues()` that wait, in the order of these and by priority; none may
        change meanwhile."""
        for node, step in reversed(queues) if backwards else queues:
            entries = self._waiting[node][step]
            for _, key in reversed(entries) if backwards else entries:
                yield self._tasks[key]

    def expired(self, now: float) -> list[OpenTask]:
        """Tasks that are held by leases whose time is over."""
        found = []
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            self._watched.remove(key)
            task = self._tasks.get(key)
            if task is not None and task.worker:
                if now >= task.until:
                    found.append(task)
                else:  # it was prolonged
                    self._watch(task)
        return found

    def _watch(self, task: OpenTask) -> None:
        self._watched.add(task.key)
        heapq.heappush(self._ends, (task.until, task.key))

    def _put(self, task: OpenTask) -> None:
        """Has a task wait."""
        entry = self._entries[task.key] = task.priority, task.key
        node, step = task.queue
        self.num_waiting[node] += 1
        bisect.insort(self._waiting.setdefault(node, {}).setdefault(step, []), entry)

    def _take(self, task: OpenTask) -> None:
        """Takes a task from its holder, or from those that wait."""
        holder = self._held.get(task.worker, {})
        if holder.pop(task.key, None) is not None and not holder:
            del self._held[task.worker]
        entry = self._entries.pop(task.key, None)
        if entry is not None:
            node, step = task.queue
            self.num_waiting[node] -= 1
            entries = self._waiting[node][step]
            del entries[bisect.bisect_left(entries, entry)]
            if not entries:
                del self._waiting[node][step]
