"""Nodes that need the fields of one group alone: they run as soon as these are there."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import Until
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
    running: Future[None] | None = None  # of the nodes that run ahead, once samples are complete
    node: str = ""  # the last of them that has begun


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


@dataclasses.dataclass(frozen=True)
class NodesAhead:
    """The nodes that run ahead: samplers, and units that run on each group by themselves."""

    sampled: frozenset[str]  # ids of sampling nodes
    units: tuple[Unit, ...]
    runners: Mapping[str, Runner]  # by the unit's name
    until: Until | None = None  # verdict on a group; of a region

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all of them."""
        return self.sampled | {unit.tasks[0].node.id for unit in self.units}

    def run(
        self,
        group: Group,
        span: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        """Runs all units on a group whose samples are complete, and judges it.

        `span(name)`: a block that times the unit of that name.
        """
        for unit in self.units:
            group.node = unit.name
            with span(unit.name):
                self._run(unit, group)
        if self.until is None:
            return
        verdicts = np.asarray(self.until(group.store.columns), bool)
        if verdicts.shape != (len(group.store.uid),):
            raise ValueError(
                f"the region's `until` gave {verdicts.shape} verdicts for {len(group.store.uid)} "
                "responses: one bool for each is needed"
            )
        group.keep = bool(verdicts.all())

    def _run(self, unit: Unit, group: Group) -> None:
        store = group.store
        values = [store.values[edge.source, edge.field] for edge in unit.inputs]
        kept, written, measured = self.runners[unit.name]({}, values)
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
