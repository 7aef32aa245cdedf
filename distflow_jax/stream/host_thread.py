"""The thread that runs the nodes ahead of training, some of which workers may run for it."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from distflow_jax.dag.plan import Unit
from distflow_jax.layout import Metrics, Parts
from distflow_jax.stream.frames.node_frames import NodeResult, read_result, task_frame
from distflow_jax.stream.host_nodes import Group, NodesAhead, Span
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.tasks import NodeTask

T = TypeVar("T")


class HostThread:
    """Runs the nodes on each group in plan order, calling user functions from a single thread.

    Nodes served by workers become tasks of the task buffer. A group continues with its next node
    when the result arrives; meanwhile the thread runs nodes of other groups.
    """

    def __init__(
        self, nodes: NodesAhead, span: Span, lock: threading.Condition, buffer: TaskBuffer
    ):
        """`lock` guards the groups' marks and the tasks."""
        self._nodes, self._span, self._lock, self._buffer = nodes, span, lock, buffer
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="host-nodes")
        self._at_work: Group | str | None = None
        self._parts: dict[str, dict[str, Parts]] = {}  # without responses, by the unit's name

    def submit(self, group: Group, done: Callable[[], object]) -> None:
        """Begins the nodes of a group; calls `done` after them, in the thread."""
        group.running = self.executor.submit(self._run, group, done, 0)

    def call(self, what: str, function: Callable[[], T]) -> Future[T]:
        """Calls a function in the thread; `what` names it where a group waits for it."""

        def run() -> T:
            with self._working(what):
                return function()

        return self.executor.submit(run)

    def waits_for(self, group: Group) -> str:
        """The node and the prompt that hold up a group whose samples are complete, or else what the
        thread is at."""
        if group.node in self._buffer.served:
            return f"{group.node} of prompt {group.counter}, which a worker runs"
        late = self._at_work or group  # one after the other
        if isinstance(late, str):
            return late
        first = next((unit.name for unit in self._nodes.units), "until")  # before it has begun
        return f"{late.node or first} of prompt {late.counter}"

    def close(self) -> None:
        """Ends the thread after the node that runs."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def _working(self, work: Group | str) -> Iterator[None]:
        """A block of the thread that works on a group, or on something else that has a name."""
        self._at_work = work
        try:
            yield
        finally:
            self._at_work = None

    def _run(self, group: Group, done: Callable[[], object], place: int) -> None:
        """Runs the nodes from a place on, up to one that workers run."""
        with self._working(group):
            for unit in self._nodes.units[place:]:
                if unit.name in self._buffer.served:
                    self._hand_over(unit, group, done, place)
                    return
                self._nodes.run_unit(unit, group, self._span)
                place += 1
            self._nodes.judge(group)
        with self._lock:
            group.done = True
            self._lock.notify_all()
        done()

    def _hand_over(self, unit: Unit, group: Group, done: Callable[[], object], place: int) -> None:
        """Makes a task of a node and a group."""
        key, store = (group.counter, unit.name), group.store
        group.node = unit.name
        content = task_frame(key, unit, [store.values[e.source, e.field] for e in unit.inputs])

        def then(result: NodeResult) -> None:
            group.running = self.executor.submit(self._go_on, group, done, place, result)

        lengths = [len(response) for response in store.columns["response"]]
        parts = functools.partial(self._of_no_response, unit, group)
        # under their ids nodes have metrics in parts
        how = {"parts": parts, "taken": self._nodes.ids, "readers": self._nodes.units}
        read = functools.partial(read_result, unit=unit, lengths=lengths, **how)
        task = NodeTask(key=key, content=content, read=read, then=then)
        with self._lock:
            self._buffer.begin(task)

    def _go_on(
        self, group: Group, done: Callable[[], object], place: int, result: NodeResult
    ) -> None:
        unit = self._nodes.units[place]
        with self._working(group):
            measured: Metrics = dict(result.numbers)
            if result.parts:
                of_none = self._of_no_response(unit, group)
                for name, values in result.parts.items():
                    measured[name] = dataclasses.replace(of_none[name], values=tuple(values))
            self._nodes.put(unit, group, result.values, measured)
        self._run(group, done, place + 1)

    def _of_no_response(self, unit: Unit, group: Group) -> Mapping[str, Parts]:
        """The metrics of a built-in stage that saw no response: they say how parts are merged."""
        if unit.is_users:  # its function measures numbers alone
            return {}
        if unit.name not in self._parts:
            values = group.store.values
            empty = [values[edge.source, edge.field][:0] for edge in unit.inputs]
            _, _, measured = self._nodes.runners[unit.name]({}, empty)
            self._parts[unit.name] = {n: m for n, m in measured.items() if isinstance(m, Parts)}
        return self._parts[unit.name]
