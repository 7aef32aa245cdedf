"""Settings that asynchronous steps cannot run with, found before any device works."""

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.dag.graph import Node
from distflow_jax.dag.plan import Plan, Task
from distflow_jax.stages.registry import takes_policy_ratio
from distflow_jax.stream.host_nodes import units_ahead
from distflow_jax.stream.stream_config import StreamConfig


def check_stream(
    config: StreamConfig,
    plan: Plan,
    algorithm: AlgorithmConfig,
    *,
    sampler_hosts: int,
    own_devices: bool,
    offload: str,
    group_tokens: int,
) -> None:
    """Raises ValueError unless a plan can run with these settings of the section `stream`.

    `sampler_hosts`: processes that share a sampler; `own_devices`: whether samplers have devices
    that no trainer uses; `group_tokens`: most of a group, of one node that samples.
    """
    if not config.ahead:
        return
    staleness = f"stream.max_staleness={config.max_staleness}"
    sampling = sampling_tasks(plan)
    if not sampling:
        raise ValueError(
            f"{staleness} needs a node that samples, and dag {plan.name!r} trains on the data's "
            "own answers; use 0"
        )
    keys = sorted({task.state_key for task in sampling})
    if len(keys) > 1:
        raise ValueError(
            f"{staleness} needs one sampler, and dag {plan.name!r} has {', '.join(keys)}; use 0, "
            "or one model for all ROLLOUT nodes"
        )
    if sampler_hosts > 1:
        raise ValueError(
            f"{staleness} needs samplers of one host, but mesh.rollout_tensor spreads a sampler "
            f"over {sampler_hosts}; use a smaller one, or max_staleness=0"
        )
    if config.weight_update == "boundary" and not own_devices:
        raise ValueError(
            "stream.weight_update='boundary' needs samplers with devices of their own, and they "
            "share the trainer's: give mesh.roles.ROLLOUT.devices devices that mesh.devices leaves "
            "out, or use weight_update='in_flight'"
        )
    if offload != "none" and not own_devices:
        raise ValueError(
            f"training.offload={offload!r} needs the place of samplers whose responses go on in "
            f"the next step ({staleness}): give mesh.roles.ROLLOUT.devices devices that "
            "mesh.devices leaves out, or use offload='none' or max_staleness=0"
        )
    off_policy = {algorithm.correction, algorithm.rejection} != {"none"}
    ratio = [task.node.id for task in plan.tasks if takes_policy_ratio(task.node)]
    if ratio and not off_policy and algorithm.proximal == "recomputed":
        raise ValueError(
            f"{staleness} trains on tokens of older weights, and without a correction node "
            f"{ratio[0]!r} takes its ratio against a policy that sampled nothing: set "
            "algorithm.correction (such as token_tis), algorithm.rejection, or "
            "algorithm.proximal=rollout, a3po or a3po_areal"
        )
    if config.divergence and not ratio:
        raise ValueError(
            f"stream.divergence={config.divergence:g} needs an update that has the policy's "
            f"log-probs beside the sampler's, and dag {plan.name!r} has none; use 0"
        )
    _check_region(plan, staleness)
    _check_budget(config, plan, own_devices, group_tokens * len(sampling))


def sampling_tasks(plan: Plan) -> list[Task]:
    """The nodes of a plan that sample, in order."""
    kind = ("ROLLOUT", "MODEL_INFERENCE", None)
    return [t for t in plan.tasks if (t.node.role, t.node.type, t.node.fn) == kind]


def nodes_ahead(plan: Plan) -> list[Node]:
    """The nodes of a plan that run ahead, in its order: those that sample, and host nodes."""
    sampled = {task.node.id for task in sampling_tasks(plan)}
    ahead = sampled | {unit.tasks[0].node.id for unit in units_ahead(plan, sampled)}
    return [task.node for task in plan.tasks if task.node.id in ahead]


def _check_budget(config: StreamConfig, plan: Plan, own_devices: bool, longest: int) -> None:
    """Raises ValueError unless rollouts can have a budget; `longest`: most tokens of a group."""
    budget = f"stream.round_tokens={config.round_tokens}"
    if not config.round_tokens:
        return
    if own_devices:
        raise ValueError(
            f"{budget} ends rollouts on the trainer's devices, and samplers with devices of their "
            "own have none that end: give mesh.roles.ROLLOUT.devices those of mesh.devices, or use "
            "round_tokens=0"
        )
    if plan.region is not None:
        raise ValueError(
            f"{budget} trains what is complete, and the region of dag {plan.name!r} cuts steps by "
            "the filter decisions of all groups before; use round_tokens=0, or a dag without a "
            "region"
        )
    if config.round_tokens < longest:
        raise ValueError(
            f"{budget} is below the {longest} tokens of the longest group (rollout.num_samples x "
            f"rollout.max_response_length): use at least {longest}"
        )


def _check_region(plan: Plan, staleness: str) -> None:
    if plan.region is None:
        return
    ahead = {node.id for node in nodes_ahead(plan)}
    if late := [name for name in plan.region.nodes if name not in ahead]:
        raise ValueError(
            f"{staleness} judges each group of the region by itself, but node {late[0]!r} needs a "
            "whole batch: give it scope group, or use max_staleness=0"
        )


def check_partial_batches(
    config: StreamConfig,
    plan: Plan,
    *,
    own_devices: bool,
    offload: str,
    aggregation: str,
    mini_prompts: int,
) -> None:
    """Raises ValueError unless a plan can run with these settings of partial batches.

    `own_devices`: whether samplers have devices that no trainer uses; `aggregation`: the one in
    effect; `mini_prompts`: groups of a mini-batch.
    """
    if not config.in_partial_batches:
        return
    partial_batches = f"stream.partial_batches={config.partial_batches!r}"
    if not own_devices:
        raise ValueError(
            f"{partial_batches} needs samplers with devices of their own: on the trainer's devices "
            "sampling and training take turns; give mesh.roles.ROLLOUT.devices devices that "
            "mesh.devices leaves out, or use partial_batches='off'"
        )
    if offload != "none":
        raise ValueError(
            f"{partial_batches} would move models with training.offload={offload!r} for each "
            "partial batch; use offload='none', or partial_batches='off'"
        )
    if config.partial_batches == "ready" and aggregation == "fixed-budget":
        raise ValueError(
            f"{partial_batches} trains on what is complete first, and what lies within the budget "
            "of algorithm.aggregation='fixed-budget' follows from all earlier responses; use "
            "partial_batches='counter'"
        )
    if config.partial_batch_prompts > mini_prompts:
        raise ValueError(
            f"stream.partial_batch_prompts={config.partial_batch_prompts} is above the "
            f"{mini_prompts} groups of a mini-batch (data.prompts_per_step / "
            "training.mini_batches), in which a partial batch lies; use less, or "
            "partial_batches='off'"
        )
    if not any(task.node.type == "MODEL_TRAIN" for task in plan.tasks):
        raise ValueError(
            f"{partial_batches} needs a node that trains, and dag {plan.name!r} has none"
        )
