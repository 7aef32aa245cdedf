"""Joining of a step's groups into the fields that the coordinator holds."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import joined
from distflow_jax.layout import STEP, Metrics, Parts
from distflow_jax.stream.host_nodes import Group, step_metrics
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.schedule import Cut


class StepGroups:
    """Joins the groups of successive steps, on one process."""

    def __init__(self, nodes: Collection[str], *, numbered: bool = False):
        """`nodes`: ids of the nodes that ran ahead; `numbered`: whether responses get the number of
        their step, which nodes of the plan read."""
        self._nodes, self._numbered = frozenset(nodes), numbered
        self._template: FieldStore | None = None
        self._parts: dict[str, Parts] = {}  # without values: of all nodes that ran ahead

    def knows(self, producer: Producer, step: int, counters: Collection[int]) -> bool:
        """Whether this process has one of the groups of a step that `counters` names, or another
        one has said which fields there are: until then `fields` and `join` have to wait.

        ValueError if no other group will come.
        """
        if self._template is not None:
            return True
        with producer.lock:
            groups = dict(producer.groups)
            ends = producer.begun_up_to(producer.admission.end(step - 1))
        if any(counter in groups for counter in counters):
            return True
        done = [group for group in groups.values() if group.done and not group.given_up]
        if done:
            self._template = done[0].store
            self._note(step_metrics(done[:1]))
        elif ends and not groups:
            raise ValueError(
                f"a process has no group of step {step}, and none follows that would say which "
                "fields groups have: raise training.steps or data.epochs, or use fewer processes"
            )
        return bool(done)

    def join(self, cut: Cut, groups: Sequence[Group], more: Metrics) -> tuple[FieldStore, Metrics]:
        """The fields of a step's groups, ordered by counter, and the metrics of nodes that ran on
        them, with `more`: all processes merge the same.

        Call it once this process `knows` the fields.
        """
        store = self.fields(cut.step, cut.kept, groups)
        metrics = step_metrics(groups) | more
        self._note(metrics)
        return store, self._parts | metrics

    def fields(self, step: int, kept: Sequence[int], groups: Sequence[Group]) -> FieldStore:
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
        if self._numbered:  # of responses of which nodes that ran ahead may have dropped some
            entries = store.uid if store.is_shared((None, STEP)) else store.own
            store.put(None, STEP, np.full(len(entries), step, np.int64))
        return store

    def _note(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if isinstance(value, Parts):
                self._parts[name] = dataclasses.replace(value, values=())
