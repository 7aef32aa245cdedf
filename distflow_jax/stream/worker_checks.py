"""Settings and nodes that workers cannot run with, found before any device works."""

from collections.abc import Iterable

from distflow_jax.dag.environment_rewards import FIELD
from distflow_jax.dag.plan import Plan, Task, Unit
from distflow_jax.did_you_mean import hint
from distflow_jax.stream.host_nodes import units_ahead
from distflow_jax.stream.stream_checks import sampling_tasks
from distflow_jax.stream.stream_config import StreamConfig


def check_workers(
    config: StreamConfig,
    plan: Plan,
    *,
    sampler_part: bool,
    environment: str,
    eval_dataset: str,
    stuck_seconds: float,
) -> None:
    """Raises ValueError unless workers can sample for a plan.

    `sampler_part`: whether mesh.roles gives samplers devices; `stuck_seconds`: after which the
    watchdog ends a run that waits.
    """
    if not config.workers:
        return
    if sampler_part:
        raise ValueError(
            "stream.workers=True leaves no sampler to the trainers, and mesh.roles.ROLLOUT gives "
            "samplers devices: take that out, or use workers=False"
        )
    if environment:
        raise ValueError(
            f"stream.workers=True answers in one turn, and rollout.environment={environment!r} "
            "answers in turns: use workers=False, with samplers on a part of the devices"
        )
    if eval_dataset:
        raise ValueError(
            f"stream.workers=True leaves no sampler to the trainers that could evaluate: set "
            f"eval.dataset='' in place of {eval_dataset!r}, and use `distflow evaluate`"
        )
    check_nodes(config.worker_nodes, plan, f"stream.worker_nodes={config.worker_nodes!r}")
    if plan.region is not None and config.weight_update == "boundary":
        raise ValueError(
            f"the region of dag {plan.name!r} has rounds with stream.weight_update='boundary', "
            "which workers do not make: use weight_update='in_flight', or workers=False"
        )
    if config.no_workers_seconds >= stuck_seconds:
        raise ValueError(
            f"stream.no_workers_seconds={config.no_workers_seconds:g} must be less than "
            f"health.stuck_seconds={stuck_seconds:g}, after which a run that waits is ended"
        )


def check_nodes(names: Iterable[str], plan: Plan, where: str) -> tuple[Unit, ...]:
    """The units of a plan that workers run for the nodes `names`; those that sample have none.

    Raises ValueError, which names `where` the names stand, for a node that workers cannot run.
    """
    names = tuple(names)
    tasks = {task.node.id: task for task in plan.tasks}
    sampled = {task.node.id for task in sampling_tasks(plan)}
    trained = {t.state_key for t in plan.tasks if t.node.type == "MODEL_TRAIN"}
    ahead = {unit.name: unit for unit in units_ahead(plan, sampled)}
    for name in names:
        if name not in tasks:
            raise ValueError(
                f"{where} names {name!r}, and dag {plan.name!r} has no such node "
                f"({hint(name, sorted(sampled | ahead.keys()))})"
            )
        if name not in sampled | ahead.keys():
            raise ValueError(f"{where} names {name!r}: {_why_not(tasks[name], trained)}")
        if name in ahead and FIELD in tasks[name].node.reads:
            raise ValueError(
                f"{where} names {name!r}, which adds the rewards of rollout.environment to its "
                "own: these belong to the samplers; take it out"
            )
    return tuple(unit for name, unit in ahead.items() if name in names)


def _why_not(task: Task, trained: set[str]) -> str:
    """The reason for which a node runs on the trainers, and the fix."""
    node, take_out = task.node, "leave it to the trainers"
    if task.state_key in trained and node.type != "COMPUTE":
        return (
            f"it runs model {task.state_key!r}, which this run trains, and only the trainers have "
            f"each step's weights; {take_out}"
        )
    if task.layout.kind != "host":
        return f"it runs on devices, and workers run nodes of the host; {take_out}"
    if node.scope == "batch":
        return f"it needs a whole batch: give it scope group or sample, or {take_out}"
    if not node.condition.active(1) or node.condition.every != 1:
        return f"it runs in some steps only, and workers run what every group needs; {take_out}"
    source = next((edge.source for edge in task.edges_in if edge.move != "stay"), None)
    after = f" of {source!r}" if source else ""
    return f"it reads fields{after} that are there only once the trainers have run; {take_out}"
