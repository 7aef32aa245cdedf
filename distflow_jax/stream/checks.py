"""Checks for settings and nodes that asynchronous sampling does not support, before device work."""

import dataclasses
from collections.abc import Iterable

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.dag.graph import Node
from distflow_jax.dag.plan import Plan, Task, Unit
from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.setting_checks import refuse
from distflow_jax.stages.registry import takes_policy_ratio
from distflow_jax.stream.host_nodes import units_ahead
from distflow_jax.stream.tasks import ENVIRONMENT


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Settings of other sections, and sizes, that asynchronous sampling must be compatible with."""

    algorithm: AlgorithmConfig
    sampler_hosts: int  # processes that share a sampler
    sampler_part: bool  # whether mesh.roles gives samplers devices
    own_devices: bool  # whether samplers have devices that no trainer uses
    offload: str
    mini_prompts: int  # groups of a mini-batch
    stuck_seconds: float  # after which the watchdog ends a run that waits
    environment: str = ""  # rollout.environment


# {conditions, see `check_plan`: message}; the first match is reported
_COMBINATIONS = {
    "workers part": "stream.workers=True leaves the trainers without samplers, but "
    "mesh.roles.ROLLOUT reserves devices for them: remove that role, or use workers=False",
    "workers impatient": "stream.no_workers_seconds={stream.no_workers_seconds:g} must be less "
    "than health.stuck_seconds={run.stuck_seconds:g}, after which the watchdog ends a waiting run",
    "ahead !samples": "{staleness} needs a sampling node, but dag {plan.name!r} trains on answers "
    "from the data; use 0",
    "ahead samplers": "{staleness} needs one sampler, but dag {plan.name!r} has {keys}; use 0, or "
    "one model for all ROLLOUT nodes",
    "ahead spread": "{staleness} needs single-host samplers, but mesh.rollout_tensor spreads a "
    "sampler over {run.sampler_hosts} hosts; lower it, or use max_staleness=0",
    "boundary !apart": "stream.weight_update='boundary' needs samplers with devices of their own, "
    "not the trainer's: {own_devices} use weight_update='in_flight'",
    "ahead offload !apart": "training.offload={run.offload!r} cannot free the memory of samplers "
    "with unfinished responses ({staleness}): {own_devices} use offload='none' or max_staleness=0",
    "ahead ratio uncorrected": "{staleness} trains on tokens of older weights, but without a "
    "correction the ratio of node {ratio!r} refers to a policy that did not sample them: set "
    "algorithm.correction (such as token_tis), algorithm.rejection, or algorithm.proximal=rollout, "
    "a3po or a3po_areal",
    "divergence !ratio": "stream.divergence={stream.divergence:g} needs an update that computes "
    "the policy's log-probs of sampled tokens, but dag {plan.name!r} has none; use 0",
    "ahead late": "{staleness} filters each group of the region separately, but node {late!r} "
    "needs a whole batch: give it scope group, or use max_staleness=0",
    "partial !apart": "{partial} needs samplers with devices of their own, because sampling and "
    "training alternate on the trainer's: {own_devices} use partial_batches='off'",
    "partial offload": "{partial} would move models with training.offload={run.offload!r} for each "
    "partial batch; use offload='none', or partial_batches='off'",
    "ready fixed_budget": "{partial} trains groups in order of completion, but the budget of "
    "algorithm.aggregation='fixed-budget' counts responses in prompt order; use "
    "partial_batches='counter'",
    "large": "stream.partial_batch_prompts={stream.partial_batch_prompts} is above the "
    "{run.mini_prompts} groups of a mini-batch (data.prompts_per_step / training.mini_batches), "
    "which a partial batch cannot exceed; lower it, or use partial_batches='off'",
    "partial !trains": "{partial} needs a training node, but dag {plan.name!r} has none",
}


def check_plan(config: StreamConfig, plan: Plan, run: Surroundings) -> None:
    """Raises ValueError unless a plan can run with these settings of the section `stream`."""
    sampling, algorithm = sampling_tasks(plan), run.algorithm
    keys = sorted({task.state_key for task in sampling})
    ahead = {node.id for node in nodes_ahead(plan)}
    where = f"stream.worker_nodes={config.worker_nodes!r}"
    check_nodes(config.worker_nodes, plan, where, run.environment)
    ratio = [task.node.id for task in plan.tasks if takes_policy_ratio(task.node)]
    judged = [task.node.id for unit in plan.split()[0] for task in unit.tasks]
    late = [name for name in judged if name not in ahead]
    off_policy = {algorithm.correction, algorithm.rejection} != {"none"}
    holds = {
        "ahead": config.ahead,
        "boundary": config.weight_update == "boundary",
        "divergence": config.divergence,
        "partial": config.in_partial_batches,
        "ready": config.partial_batches == "ready",
        "large": config.partial_batch_prompts > run.mini_prompts,
        "workers": config.workers,
        "impatient": config.no_workers_seconds >= run.stuck_seconds,
        "part": run.sampler_part,
        "apart": run.own_devices,
        "spread": run.sampler_hosts > 1,
        "offload": run.offload != "none",
        "late": late,
        "samples": sampling,
        "samplers": len(keys) > 1,
        "trains": any(task.node.type == "MODEL_TRAIN" for task in plan.tasks),
        "ratio": ratio,
        "uncorrected": not off_policy and algorithm.proximal == "recomputed",
        "fixed_budget": algorithm.loss_aggregation == "fixed-budget",
    }
    values = {
        "staleness": f"stream.max_staleness={config.max_staleness}",
        "partial": f"stream.partial_batches={config.partial_batches!r}",
        "own_devices": "give mesh.roles.ROLLOUT.devices devices that mesh.devices leaves out, or",
        "keys": ", ".join(keys),
        "ratio": "".join(ratio[:1]),
        "late": "".join(late[:1]),
    }
    refuse(_COMBINATIONS, holds, stream=config, plan=plan, run=run, **values)


def sampling_tasks(plan: Plan) -> list[Task]:
    """The nodes of a plan that sample, in order."""
    kind = ("ROLLOUT", "MODEL_INFERENCE", None)
    return [t for t in plan.tasks if (t.node.role, t.node.type, t.node.fn) == kind]


def nodes_ahead(plan: Plan) -> list[Node]:
    """The nodes of a plan that run ahead, in its order: those that sample, and host nodes."""
    sampled = {task.node.id for task in sampling_tasks(plan)}
    ahead = sampled | {unit.tasks[0].node.id for unit in units_ahead(plan, sampled)}
    return [task.node for task in plan.tasks if task.node.id in ahead]


def check_nodes(names: Iterable[str], plan: Plan, where: str, hosted: str = "") -> tuple[Unit, ...]:
    """The units of a plan that workers run for the nodes `names`; those that sample have none, and
    ENVIRONMENT, which is `hosted`: rollout.environment.

    Raises ValueError, which names `where` the names stand, for a node that workers cannot run.
    """
    names = tuple(names)
    tasks = {task.node.id: task for task in plan.tasks}
    sampled = {task.node.id for task in sampling_tasks(plan)}
    trained = {t.state_key for t in plan.tasks if t.node.type == "MODEL_TRAIN"}
    ahead = {unit.name: unit for unit in units_ahead(plan, sampled)}
    if ENVIRONMENT in names and ENVIRONMENT in tasks:
        raise ValueError(
            f"{where} names {ENVIRONMENT!r}, which stands for rollout.environment, but dag "
            f"{plan.name!r} has a node of this name: rename it"
        )
    if ENVIRONMENT in names and not hosted:
        raise ValueError(
            f"{where} names {ENVIRONMENT!r}, but there is no environment to run: set "
            "rollout.environment, or remove the name"
        )
    known = sampled | ahead.keys() | ({ENVIRONMENT} if hosted else set())
    for name in names:
        if name not in tasks.keys() | known:
            raise ValueError(
                f"{where} names {name!r}, but dag {plan.name!r} has no such node "
                f"({hint(name, sorted(known))})"
            )
        if name not in known:
            raise ValueError(f"{where} names {name!r}: {_why_not(tasks[name], trained)}")
    return tuple(unit for name, unit in ahead.items() if name in names)


def _why_not(task: Task, trained: set[str]) -> str:
    """The reason why a node must run on the trainers, and the fix."""
    node, take_out = task.node, "leave it to the trainers"
    if task.state_key in trained and node.type != "COMPUTE":
        return (
            f"it runs model {task.state_key!r}, which this run trains, and only the trainers hold "
            f"the current weights; {take_out}"
        )
    if task.layout.kind != "host":
        return f"it runs on devices, but workers run host nodes only; {take_out}"
    if node.scope == "batch":
        return f"it needs a whole batch: give it scope group or sample, or {take_out}"
    if not node.condition.active(1) or node.condition.every != 1:
        return f"it runs in some steps only, but workers run nodes of every group; {take_out}"
    source = next((edge.source for edge in task.edges_in if edge.move != "stay"), None)
    after = f" of {source!r}" if source else ""
    return f"it reads fields{after} that exist only after the trainers have run; {take_out}"
