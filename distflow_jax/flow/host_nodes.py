"""Nodes that need the fields of one group alone: they run as soon as these are there."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.dag.plan import Plan, Unit
from distflow_jax.dag.plan_walker import COUNTS, Runner
from distflow_jax.layout import Metrics, Parts


@dataclasses.dataclass(eq=False)
class Group:
    """The responses to one prompt, from their first token to the step that trains them."""

    counter: int  # of the prompt
    store: FieldStore
    sampling: set[str]  # ids of the nodes whose samples are not complete
    metrics: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    done: bool = False  # all nodes that run ahead have run
    keep: bool = True  # the verdict of a region, once it is done


def units_ahead(plan: Plan, sampled: Collection[str]) -> tuple[Unit, ...]:
    """The units that can run on each group by itself, in the order of the plan.

    These are nodes on the host of scope "sample" or "group" that run in every step and read nothing
    but the loader's fields, those of `sampled` (ids of sampling nodes) and each other's.
    """
    known: set[str | None] = {None, *sampled}
    found = []
    for unit in plan.units:
        (task, *others) = unit.tasks
        node = task.node
        if node.id in known or others or unit.layout.kind != "host" or node.scope == "batch":
            continue
        always = node.condition.active(1) and node.condition.every == 1
        if always and all(e.source in known and e.move == "stay" for e in unit.inputs):
            known.add(node.id)
            found.append(unit)
    return tuple(found)


class HostNodes:
    """Runs units on groups, one group after the other, in a thread of its own.

    Functions of the user are called from this one thread.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        runners: Mapping[str, Runner],
        finished: Callable[[Group], None],
        failed: Callable[[BaseException], None],
    ):
        """`finished(group)` and `failed(error)` are called in this thread."""
        self._units, self._runners = tuple(units), runners
        self._finished, self._failed = finished, failed
        self._groups: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="host-nodes", daemon=True)
        self._thread.start()

    def submit(self, group: Group) -> None:
        """Has all units run on a group whose samples are complete."""
        self._groups.put(group)

    def close(self) -> None:
        """Ends the thread after the group that it is at."""
        self._groups.put(None)
        self._thread.join(timeout=5.0)

    def _serve(self) -> None:
        while (group := self._groups.get()) is not None:
            try:
                for unit in self._units:
                    self._run(unit, group)
                self._finished(group)
            except BaseException as error:  # the step that needs the group raises it
                self._failed(error)
                return

    def _run(self, unit: Unit, group: Group) -> None:
        store = group.store
        values = [store.values[edge.source, edge.field] for edge in unit.inputs]
        kept, written, measured = self._runners[unit.name]({}, values)
        if kept:
            raise ValueError(
                f"node {unit.name!r} keeps a state, and with flow.max_lag above 0 its groups come "
                "in any order: give it scope batch"
            )
        for (source, field), value in zip(unit.outputs, written, strict=True):
            store.put(source, field, value)
        for name, value in measured.items():
            group.metrics.setdefault(name, []).append(value)


def step_metrics(groups: Sequence[Group]) -> Metrics:
    """Metrics of the nodes that ran on these groups: Parts together, counts added, others' mean."""
    found: dict[str, list[Any]] = {}
    for group in groups:
        for name, values in group.metrics.items():
            found.setdefault(name, []).extend(values)
    merged: Metrics = {}
    for name, values in found.items():
        if isinstance(values[0], Parts):
            merged[name] = sum(values[1:], start=values[0])
        elif name.endswith(COUNTS):
            merged[name] = sum(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged
