"""The nodes that run ahead of training in a process whose workers run some of them."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping

from distflow_jax.dag.plan import Unit
from distflow_jax.layout import Metrics, Parts
from distflow_jax.stream.frames.node_frames import NodeResult, is_users, read_result, task_frame
from distflow_jax.stream.host_nodes import Group, HostThread, NodesAhead, Span
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.tasks import NodeTask


class LeasedNodes(HostThread):
    """Runs the nodes on each group in plan order.

    Nodes served by workers become tasks of the task buffer. A group continues with its next node
    when the result arrives; meanwhile the thread runs nodes of other groups.
    """

    def __init__(
        self, nodes: NodesAhead, span: Span, lock: threading.Condition, buffer: TaskBuffer
    ):
        """`lock` guards the groups' marks and the tasks."""
        super().__init__(nodes, span, lock)
        self._buffer = buffer
        self._parts: dict[str, dict[str, Parts]] = {}  # without responses, by the unit's name

    def waits_for(self, group: Group) -> str:
        """The node and the prompt that hold up a group whose samples are complete."""
        if group.node in self._buffer.served:
            return f"{group.node} of prompt {group.counter}, which a worker runs"
        return super().waits_for(group)

    def _run(self, group: Group, done: Callable[[], object], place: int = 0) -> None:
        units = self._nodes.units
        while place < len(units) and units[place].name not in self._buffer.served:
            with self.at_work(group):
                self._nodes.run_unit(units[place], group, self._span)
            place += 1
        if place == len(units):
            with self.at_work(group):
                self._nodes.judge(group)
            self._end(group, done)
        else:
            self._hand_over(units[place], group, done, place)

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
        taken = self._nodes.ids
        read = functools.partial(read_result, unit=unit, lengths=lengths, parts=parts, taken=taken)
        task = NodeTask(key=key, content=content, read=read, then=then)
        with self._lock:
            self._buffer.begin(task)

    def _go_on(
        self, group: Group, done: Callable[[], object], place: int, result: NodeResult
    ) -> None:
        unit = self._nodes.units[place]
        with self.at_work(group):
            measured: Metrics = dict(result.numbers)
            if result.parts:
                of_none = self._of_no_response(unit, group)
                for name, values in result.parts.items():
                    measured[name] = dataclasses.replace(of_none[name], values=tuple(values))
            self._nodes.put(unit, group, result.values, measured)
        self._run(group, done, place + 1)

    def _of_no_response(self, unit: Unit, group: Group) -> Mapping[str, Parts]:
        """The metrics of a built-in stage that saw no response: they say how parts are merged."""
        if is_users(unit):  # its function measures numbers alone
            return {}
        if unit.name not in self._parts:
            values = group.store.values
            empty = [values[edge.source, edge.field][:0] for edge in unit.inputs]
            _, _, measured = self._nodes.runners[unit.name]({}, empty)
            self._parts[unit.name] = {n: m for n, m in measured.items() if isinstance(m, Parts)}
        return self._parts[unit.name]
