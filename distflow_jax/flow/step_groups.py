"""The groups of a step, joined to the fields that the coordinator holds."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import joined
from distflow_jax.flow.host_nodes import Group, step_metrics
from distflow_jax.flow.lag_rule import Cut
from distflow_jax.layout import Metrics, Parts


class StepGroups:
    """Joins the groups of one step after the other, on one process."""

    def __init__(self, nodes: Collection[str]):
        """`nodes`: ids of the nodes that ran ahead."""
        self._nodes = frozenset(nodes)
        self._template: FieldStore | None = None
        self._parts: dict[str, Parts] = {}  # without values: of all nodes that ran ahead

    def join(self, cut: Cut, groups: Sequence[Group], more: Metrics) -> tuple[FieldStore, Metrics]:
        """The fields of a step's groups, ordered by counter, and the metrics of nodes that ran on
        them, with `more`: all processes merge the same.

        A process may have no group of a step but the first one, for which that is a ValueError.
        """
        store = self.fields(cut.kept, groups)
        metrics = step_metrics(groups) | more
        self._note(metrics)
        return store, self._parts | metrics

    def learn(self, groups: Sequence[Group]) -> None:
        """Notes which fields and metrics groups have, for steps of which this process has none."""
        self.fields((), groups)
        self._note(step_metrics(groups))

    def fields(self, kept: Sequence[int], groups: Sequence[Group]) -> FieldStore:
        """The fields of this process's groups whose counters are `kept`, ordered by counter."""
        groups = sorted(groups, key=lambda group: group.counter)
        stores = [group.store for group in groups]
        if stores:
            self._template = stores[0]
        if self._template is None:
            raise ValueError(
                "a process has no group in the first step: raise data.prompts_per_step, or use "
                "fewer processes"
            )
        store = joined(stores or [self._template], np.array(kept, np.int64))
        store.done = self._nodes
        return store

    def _note(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if isinstance(value, Parts):
                self._parts[name] = dataclasses.replace(value, values=())
