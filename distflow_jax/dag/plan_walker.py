"""The loop that walks one plan: get fields, run the unit, put fields, time it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from distflow_jax.dag.plan import Plan, Task, Unit
from distflow_jax.layout import Edge, Metrics

COUNTS = ("_calls", "/errors", "/timeouts")  # ends of metrics that add up over rounds

# (state, fields by their name inside the stage, options) -> state, fields it writes, metrics
Stage = Callable[[Any, dict[str, Any], dict[str, Any]], tuple[Any, Mapping[str, Any], Metrics]]

# (states by key, values in the order of Unit.inputs) -> states to keep, values in the order of
# Unit.outputs, metrics
Runner = Callable[[Mapping[str, Any], Sequence[Any]], tuple[dict[str, Any], Sequence[Any], Metrics]]

# name -> times what happens inside its `with` block, under that name
Span = Callable[[str], AbstractContextManager[Any]]


class Coordinator(Protocol):
    """Fields of a step, kept between their writer and their readers.

    A protocol because `coordinator/` stands above `dag/`, which cannot import its class.

    A value is known by (source, field), so that a node may write a field anew while another still
    reads the version before. What the loader gives has the source None.
    """

    def put(self, source: str | None, field: str, value: Any) -> None:
        """Takes what `source` wrote."""

    def get(self, edge: Edge) -> Any:
        """The value in the layout that the reader asks for."""

    def free(self, source: str | None, field: str) -> None:
        """Forgets the value: its last reader is done."""


def run_step(
    plan: Plan,
    step: int,
    runners: Mapping[str, Runner],
    states: Mapping[str, Any],
    coordinator: Coordinator,
    span: Span,
    next_round: Callable[[], bool] | None = None,
    rehearse: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
) -> tuple[dict[str, Any], Metrics]:
    """Runs every unit of the plan that this step (counted from 1) asks for.

    `runners` are keyed by the unit's name, `states` by Task.state_key; a stage without a state is
    handed None, and a state of None is not kept. Runners may donate what they are handed: use the
    states returned, never those passed in. What the loader gives is put before, with the source
    None.

    `span` times the `with` block of each unit. The units of a region run as long as `next_round`,
    which puts the next prompts, returns true; a plan without a region needs none. Of several rounds
    a metric is the mean, and where its name ends in one of COUNTS the sum.

    With `rehearse`, which turns fields into empty ones, device units that this step does not ask
    for run too, so that nothing compiles when their time comes: those that train on empty fields,
    from which they learn nothing, the others for nothing.
    """
    states = dict(states)
    inside, after = plan.split()
    per_round = []
    while inside and next_round():
        ran = {None}
        per_round.append(_run(inside, step, runners, states, coordinator, span, ran, None))
    metrics = _mean_or_sum(per_round)
    ran = {None, *(task.node.id for unit in inside for task in unit.tasks)}
    measured = _run(after, step, runners, states, coordinator, span, ran, rehearse)
    _merge(metrics, measured, "a node after the region")
    return states, metrics


def _run(
    units: Sequence[Unit],
    step: int,
    runners: Mapping[str, Runner],
    states: dict[str, Any],
    coordinator: Coordinator,
    span: Span,
    ran: set[str | None],
    rehearse: Callable[[Sequence[Any]], Sequence[Any]] | None,
) -> Metrics:
    """Runs units one after the other; updates `states` and `ran`, whose values there may be."""
    metrics: Metrics = {}
    for unit in units:
        active, trains = unit.condition.active(step), unit.tasks[0].node.type == "MODEL_TRAIN"
        if active or (rehearse is not None and _can_rehearse(unit, ran)):
            with span(unit.name):
                values = [coordinator.get(edge) for edge in unit.inputs]
                if not active and trains:
                    values = rehearse(values)
                kept, written, measured = runners[unit.name](states, values)
                del values  # what is freed below must not live on through this name
                for (source, field), value in zip(unit.outputs, written, strict=True):
                    coordinator.put(source, field, value)
            if active or trains:
                states |= kept
            if active:
                _merge(metrics, measured, _title(unit))
            ran.update(task.node.id for task in unit.tasks)
        for source, field in unit.frees:
            if source in ran:
                coordinator.free(source, field)
    return metrics


def _can_rehearse(unit: Unit, ran: Collection[str | None]) -> bool:
    """Whether a unit is one on devices whose inputs are there."""
    return unit.layout.kind == "mesh" and {edge.source for edge in unit.inputs} <= set(ran)


def make_runner(unit: Unit, stages: Mapping[str, Stage]) -> Runner:
    """The unit's stages, one after the other. `stages` are keyed by node id.

    Can be traced where its stages can: then all of the unit is one program. States that did not
    change and those that are None are left out of what it returns.
    """

    def run(states, values):
        known = {(e.source, e.field): v for e, v in zip(unit.inputs, values, strict=True)}
        del values
        now = {key: states.get(key) for key in unit.state_keys}
        metrics: Metrics = {}
        for task in unit.tasks:
            node, fields = (
                task.node,
                {edge.field: (edge.source, edge.field) for edge in task.edges_in},
            )
            inputs = {inside: known[fields[field]] for inside, field in node.reads.items()}
            state = now[task.state_key]
            state, written, measured = stages[node.id](state, inputs, dict(node.options))
            _check_written(task, written)
            known |= {(node.id, field): written[inside] for inside, field in node.writes.items()}
            now[task.state_key] = state
            _merge(metrics, measured, f"node {node.id!r}")
        kept = {k: s for k, s in now.items() if s is not None and s is not states.get(k)}
        return kept, [known[value] for value in unit.outputs], metrics

    return run


def _mean_or_sum(per_round: Sequence[Metrics]) -> Metrics:
    merged = {}
    for name in dict.fromkeys(name for metrics in per_round for name in metrics):
        values = [metrics[name] for metrics in per_round if name in metrics]
        total = sum(values[1:], start=values[0])
        merged[name] = total if name.endswith(COUNTS) else total / len(values)
    return merged


def _check_written(task: Task, written: Mapping[str, Any]) -> None:
    missing = sorted(set(task.node.writes) - set(written))
    extra = sorted(set(written) - set(task.node.writes))
    if missing or extra:
        raise ValueError(
            f"node {task.node.id!r}: its stage did not write what the node declares: "
            f"missing {missing}, not declared {extra}"
        )


def _title(unit: Unit) -> str:
    return f"{'node' if len(unit.tasks) == 1 else 'one of the nodes'} {unit.name!r}"


def _merge(metrics: Metrics, measured: Metrics, who: str) -> None:
    twice = sorted(set(metrics) & set(measured))
    if twice:
        raise ValueError(
            f"{who}: reports metrics that an earlier node of this step reports: {twice}"
        )
    metrics.update(measured)
