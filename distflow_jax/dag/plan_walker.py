"""The loop that walks a plan: get fields, run the unit, put fields, time it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from distflow_jax.dag.plan import Plan, Task, Unit
from distflow_jax.layout import Edge, Metrics, Parts

# ends of numbers that add up over rounds; those in Parts say themselves how they are merged
COUNTS = (
    "_calls",
    "/errors",
    "/timeouts",
    "rollout/images_encoded",
    "rollout/prefix/hits",
    "rollout/prefix/tokens",
    "trajectories/reread_tokens",
)

# (state, fields by their name inside the stage, options) -> state, fields it writes, metrics
Stage = Callable[[Any, dict[str, Any], dict[str, Any]], tuple[Any, Mapping[str, Any], Metrics]]

# (states by key, values in the order of Unit.inputs) -> states to keep, values in the order of
# Unit.outputs, metrics
Runner = Callable[[Mapping[str, Any], Sequence[Any]], tuple[dict[str, Any], Sequence[Any], Metrics]]

# name -> timer of a `with` block, under that name
Span = Callable[[str], AbstractContextManager[Any]]

# fields -> empty ones, see run_step
Rehearse = Callable[[Sequence[Any]], Sequence[Any]]


class StepStore(Protocol):
    """The store of a step's fields between writer and readers.

    A protocol because `dag/` cannot import its class: Coordinator, of `coordinator/` above it.

    A value's key is (source, field), so that a node may write a field again while another still
    reads the version before. The source of the loader's fields is None.
    """

    @property
    def done(self) -> Collection[str]:
        """Nodes that ran before the walk, for these samples: they do not run again."""

    def merged(self, metrics: Metrics) -> Metrics:
        """Metrics of nodes, in which numbers of all processes take the place of layout.Parts."""

    def put(self, source: str | None, field: str, value: Any) -> None:
        """Stores a value that `source` wrote."""

    def get(self, edge: Edge) -> Any:
        """The value in the layout of the edge's reader."""

    def free(self, source: str | None, field: str) -> None:
        """Drops a value after its last reader."""


def run_step(
    plan: Plan,
    step: int,
    runners: Mapping[str, Runner],
    states: Mapping[str, Any],
    coordinator: StepStore,
    span: Span,
    next_round: Callable[[], bool] | None = None,
    rehearse: Rehearse | None = None,
) -> tuple[dict[str, Any], Metrics]:
    """Runs the units of the plan that are active in this step.

    Args:
      plan: the plan.
      step: the step's number, from 1.
      runners: by the unit's name. They may donate the states that they are called with.
      states: by Task.state_key, never used after the call. A stage without a state gets None, and
        a state of None is not kept.
      coordinator: store of fields; the loader's are put before the call, with the source None.
      span: times the `with` block of each unit.
      next_round: puts the next prompts, or returns false. The units of a region run as long as it
        returns true; a plan without a region needs none. Metrics in Parts are merged over all
        rounds; another one is the mean of the rounds, or their sum if its name ends in one of
        COUNTS.
      rehearse: turns fields into empty ones. With it, device units that are not active run too, so
        that nothing compiles when they become active. Those that train run on empty fields, which
        change no weights; results of the others are not used.

    Returns:
      (states, metrics).
    """
    states = dict(states)
    inside, after = plan.split()
    per_round, metrics = [], {}
    while inside and next_round():
        ran = {None}
        per_round.append(run_units(inside, step, runners, states, coordinator, span, ran, None))
        metrics = coordinator.merged(per_round[-1])  # or its error, before there is another round
    if len(per_round) > 1:
        metrics = coordinator.merged(_over_rounds(per_round))
    ran = {None, *(task.node.id for unit in inside for task in unit.tasks)}
    measured = run_units(after, step, runners, states, coordinator, span, ran, rehearse)
    merge_measured(metrics, coordinator.merged(measured), "a node after the region")
    return states, metrics


def run_units(
    units: Sequence[Unit],
    step: int,
    runners: Mapping[str, Runner],
    states: dict[str, Any],
    coordinator: StepStore,
    span: Span,
    ran: set[str | None],
    rehearse: Rehearse | None,
) -> Metrics:
    """Runs units in order, and returns their metrics; see `run_step`.

    `runners` are made by runtime/build.py, from the stages that stages/registry.py has for nodes.
    Updates `states` and `ran`, the sources whose values exist.
    """
    metrics: Metrics = {}
    for unit in units:
        active, trains = unit.condition.active(step), unit.tasks[0].node.type == "MODEL_TRAIN"
        if all(task.node.id in coordinator.done for task in unit.tasks):
            ran.update(task.node.id for task in unit.tasks)
        elif active or (rehearse is not None and _can_rehearse(unit, ran)):
            with span(unit.name):
                values = [coordinator.get(edge) for edge in unit.inputs]
                if not active and trains:
                    values = rehearse(values)
                kept, written, measured = runners[unit.name](states, values)
                del values  # or values freed below would stay alive
                for (source, field), value in zip(unit.outputs, written, strict=True):
                    coordinator.put(source, field, value)
            if active or trains:
                states |= kept
            if active:
                nodes = "node" if len(unit.tasks) == 1 else "one of the nodes"
                merge_measured(metrics, measured, f"{nodes} {unit.name!r}")
            ran.update(task.node.id for task in unit.tasks)
        for source, field in unit.frees:
            if source in ran:
                coordinator.free(source, field)
    return metrics


def _can_rehearse(unit: Unit, ran: Collection[str | None]) -> bool:
    """Whether a unit runs on devices and its inputs exist."""
    return unit.layout.kind == "mesh" and {edge.source for edge in unit.inputs} <= set(ran)


def make_runner(unit: Unit, stages: Mapping[str, Stage]) -> Runner:
    """The runner of a unit: its stages in order. `stages` are keyed by node id.

    It can be traced if its stages can: the whole unit is then one program. It does not return
    states that are None or unchanged.
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
            merge_measured(metrics, measured, f"node {node.id!r}")
        kept = {k: s for k, s in now.items() if s is not None and s is not states.get(k)}
        return kept, [known[value] for value in unit.outputs], metrics

    return run


def _over_rounds(per_round: Sequence[Metrics]) -> Metrics:
    merged: Metrics = {}
    for name in dict.fromkeys(name for metrics in per_round for name in metrics):
        values = [metrics[name] for metrics in per_round if name in metrics]
        total = sum(values[1:], start=values[0])
        adds_up = isinstance(total, Parts) or name.endswith(COUNTS)
        merged[name] = total if adds_up else total / len(values)
    return merged


def _check_written(task: Task, written: Mapping[str, Any]) -> None:
    missing = sorted(set(task.node.writes) - set(written))
    extra = sorted(set(written) - set(task.node.writes))
    if missing or extra:
        raise ValueError(
            f"node {task.node.id!r}: its stage and its writes differ: missing {missing}, not "
            f"declared {extra}"
        )


def merge_measured(metrics: Metrics, measured: Metrics, source: str) -> None:
    """Adds the metrics that `source` reports. Raises ValueError for one that is there already."""
    twice = sorted(set(metrics) & set(measured))
    if twice:
        raise ValueError(
            f"{source}: reports metrics that an earlier node of this step reports: {twice}; rename "
            "them"
        )
    metrics.update(measured)
