"""Host nodes that need only the fields of one group, and run as soon as these exist."""

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
from distflow_jax.environments.episodes import Episode
from distflow_jax.layout import OF_RESPONSE, ROWS_COLUMNS, STEP, VERSION, Metrics, Parts

Span = Callable[[str], contextlib.AbstractContextManager]  # times a block under a name


@dataclasses.dataclass(eq=False)
class Group:
    """The responses to one prompt, from their first token to the step that trains them."""

    counter: int  # of the prompt
    store: FieldStore
    sampling: set[str]  # ids of the nodes whose samples are not complete
    # responses of the nodes whose samples are complete, by the node's id
    samples: dict[str, list[Episode]] = dataclasses.field(default_factory=dict)
    metrics: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    done: bool = False  # all nodes that run ahead have run
    keep: bool = True  # the filter decision of a region, once it is done
    given_up: bool = False  # no worker can answer it: it is done, without responses, and not kept
    running: Future[None] | None = None  # of the nodes that run ahead, once samples are complete
    node: str = ""  # the last of them that has begun
    workers: set[str] = dataclasses.field(default_factory=set)  # that its tokens are of

    @property
    def tokens(self) -> int:
        """Tokens that were sampled, of nodes whose samples are complete."""
        return sum(e.num_sampled for episodes in self.samples.values() for e in episodes)


def units_ahead(plan: Plan, sampled: Collection[str]) -> tuple[Unit, ...]:
    """The units that can run on each group by itself, in the order of the plan.

    These are nodes on the host of scope "sample" or "group" that run in every step and read nothing
    but the loader's fields, those of `sampled` (ids of sampling nodes) and each other's. The number
    of the step is not known before the step.
    """
    known: set[str | None] = {None, *sampled}
    found = []
    for unit in plan.units:
        (task, *others) = unit.tasks
        node = task.node
        if node.id in known or others or unit.layout.kind != "host" or node.scope == "batch":
            continue
        always = node.condition.active(1) and node.condition.every == 1
        known_early = (
            e.source in known and e.move == "stay" and (e.source, e.field) != (None, STEP)
            for e in unit.inputs
        )
        if always and all(known_early):
            known.add(node.id)
            found.append(unit)
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class NodesAhead:
    """The nodes that run ahead of training: samplers, and units that run on each group."""

    sampled: frozenset[str]  # ids of sampling nodes
    units: tuple[Unit, ...]
    runners: Mapping[str, Runner]  # by the unit's name
    until: Until | None = None  # filter decision on a group; of a region

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all of them."""
        return self.sampled | {unit.tasks[0].node.id for unit in self.units}

    @property
    def single(self) -> frozenset[str]:
        """Fields of one number per response: those that the loop or a built-in node reads."""
        read = {e.field for unit in self.units if not unit.is_users for e in unit.inputs}
        return OF_RESPONSE | read - {*ROWS_COLUMNS, VERSION}

    def judge(self, group: Group) -> None:
        """Notes a region's filter decision on a group, all of whose nodes have run."""
        if self.until is None:
            return
        decisions = np.asarray(self.until(group.store.columns), bool)
        responses = len(group.store.own)  # a node may have dropped some
        if decisions.shape != (responses,):
            raise ValueError(
                f"the region's `until` gave {decisions.shape} filter decisions for {responses} "
                "responses: one bool for each is needed"
            )
        group.keep = bool(decisions.all())

    def run_unit(self, unit: Unit, group: Group, span: Span) -> None:
        """Runs one unit on a group; `span(name)`: a block that times the unit of that name."""
        group.node = unit.name
        with span(unit.name):
            values = [group.store.values[edge.source, edge.field] for edge in unit.inputs]
            self.put(unit, group, *self.results(unit, values))

    def results(self, unit: Unit, values: Sequence[Any]) -> tuple[Sequence[Any], Metrics]:
        """(values that a unit writes, its metrics) for the values of one group that it reads."""
        kept, written, measured = self.runners[unit.name]({}, values)
        if kept:
            raise ValueError(
                f"node {unit.name!r} keeps a state, and with stream.max_staleness above 0 its "
                "groups come in any order: give it scope batch"
            )
        return written, measured

    def put(self, unit: Unit, group: Group, written: Sequence[Any], measured: Metrics) -> None:
        """Gives a group what a unit wrote and measured for it."""
        for (source, field), value in zip(unit.outputs, written, strict=True):
            group.store.put(source, field, value)
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
