"""The loop that walks one plan: get fields, call the stage, put fields, time it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from distflow_jax.dag.planner import Plan, Task
from distflow_jax.types import Edge, Metrics

COUNTS = ("_calls", "/errors", "/timeouts")  # ends of metrics that add up over rounds

# (state, fields by their name inside the stage, options) -> state, fields it writes, metrics
Stage = Callable[[Any, dict[str, Any], dict[str, Any]], tuple[Any, Mapping[str, Any], Metrics]]


class Coordinator(Protocol):
    """Keeps the fields of a step between their writer and their readers.

    A value is known by (source, field), so that a node may write a field anew while another still
    reads the version before. What the loader gives has the source None.
    """

    def put(self, source: str | None, field: str, value: Any) -> None:
        """Takes what `source` wrote."""

    def get(self, edge: Edge) -> Any:
        """The value in the layout that the reader asks for."""

    def free(self, source: str | None, field: str) -> None:
        """Forgets the value: its last reader is done."""


class Rounds(Protocol):
    """Decides how often a region runs."""

    def next(self) -> bool:
        """Whether to run the region's nodes (again), with the next prompts."""


class Spans(Protocol):
    """Times what happens inside a `with` block."""

    def span(self, name: str, **args: Any) -> AbstractContextManager[Any]:
        """A span of this name."""


def run_step(
    plan: Plan,
    step: int,
    stages: Mapping[str, Stage],
    states: Mapping[str, Any],
    coordinator: Coordinator,
    spans: Spans,
    rounds: Rounds | None = None,
    rehearse: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> tuple[dict[str, Any], Metrics]:
    """Runs every task of the plan that this step (counted from 1) asks for.

    `stages` are keyed by node id, `states` by Task.state_key; a stage without a state is handed
    None, and a state of None is not kept. Stages may donate what they are handed: use the states
    returned, never those passed in. What the loader gives is put before, with the source None.

    The tasks of a region run as long as `rounds.next()` says so. Of several rounds a metric is the
    mean, and where its name ends in one of COUNTS the sum.

    With `rehearse`, which turns fields into empty ones, built-in device nodes that this step does
    not ask for run too, so that nothing compiles when their time comes: those that train on empty
    fields, from which they learn nothing, the others for nothing.
    """
    states = dict(states)
    inside, after = plan.split()
    per_round = []
    while inside and rounds.next():
        ran = {None}
        per_round.append(_run(inside, step, stages, states, coordinator, spans, ran, None))
    metrics = _mean_or_sum(per_round)
    ran = {None, *(task.node.id for task in inside)}
    measured = _run(after, step, stages, states, coordinator, spans, ran, rehearse)
    _merge(metrics, measured, after[0].node.id if after else "")
    return states, metrics


def _run(
    tasks: Sequence[Task],
    step: int,
    stages: Mapping[str, Stage],
    states: dict[str, Any],
    coordinator: Coordinator,
    spans: Spans,
    ran: set[str | None],
    rehearse: Callable[[dict[str, Any]], dict[str, Any]] | None,
) -> Metrics:
    """Runs tasks one after the other; updates `states` and `ran`, whose values there may be."""
    metrics: Metrics = {}
    for task in tasks:
        node = task.node
        active = node.condition.active(step)
        if active or (rehearse is not None and _can_rehearse(task, ran)):
            with spans.span(node.id):
                fields = _inputs(task, coordinator)
                if not active and node.type == "MODEL_TRAIN":
                    fields = rehearse(fields)
                state = states.get(task.state_key)
                state, written, measured = stages[node.id](state, fields, dict(node.options))
                del fields  # what is freed below must not live on through this name
                _check_written(task, written)
                for inside, field in node.writes.items():
                    coordinator.put(node.id, field, written[inside])
            if state is not None and (active or node.type == "MODEL_TRAIN"):
                states[task.state_key] = state
            if active:
                _merge(metrics, measured, node.id)
            ran.add(node.id)
        for source, field in task.frees:
            if source in ran:
                coordinator.free(source, field)
    return metrics


def _can_rehearse(task: Task, ran: Collection[str | None]) -> bool:
    """Whether a node is a built-in one on devices whose inputs are there."""
    inputs = {edge.source for edge in task.edges_in}
    return task.layout.kind == "mesh" and task.node.fn is None and inputs <= set(ran)


def _mean_or_sum(per_round: Sequence[Metrics]) -> Metrics:
    merged = {}
    for name in dict.fromkeys(name for metrics in per_round for name in metrics):
        values = [metrics[name] for metrics in per_round if name in metrics]
        total = sum(values[1:], start=values[0])
        merged[name] = total if name.endswith(COUNTS) else total / len(values)
    return merged


def _inputs(task: Task, coordinator: Coordinator) -> dict[str, Any]:
    values = {edge.field: coordinator.get(edge) for edge in task.edges_in}
    return {inside: values[field] for inside, field in task.node.reads.items()}


def _check_written(task: Task, written: Mapping[str, Any]) -> None:
    missing = sorted(set(task.node.writes) - set(written))
    extra = sorted(set(written) - set(task.node.writes))
    if missing or extra:
        raise ValueError(
            f"node {task.node.id!r}: its stage did not write what the node declares: "
            f"missing {missing}, not declared {extra}"
        )


def _merge(metrics: Metrics, measured: Metrics, node_id: str) -> None:
    twice = sorted(set(metrics) & set(measured))
    if twice:
        raise ValueError(
            f"node {node_id!r}: reports metrics that an earlier node of this step reports: {twice}"
        )
    metrics.update(measured)
