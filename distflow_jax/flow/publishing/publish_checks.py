"""Settings that samplers cannot take weights with, found before any device works."""

from distflow_jax.dag.plan import Plan
from distflow_jax.flow.flow_config import FlowConfig
from distflow_jax.stages.registry import takes_policy_ratio


def check_publishing(config: FlowConfig, plan: Plan, *, samplers: int, own_devices: bool) -> None:
    """Raises ValueError unless a plan can run with these settings of swaps.

    `samplers`: of the job; `own_devices`: whether they have devices that no trainer uses.
    """
    stagger = f"flow.stagger={config.stagger}"
    if config.stagger > 1 and not own_devices:
        raise ValueError(
            f"{stagger} needs samplers with devices of their own: on the trainer's devices all of "
            "them pause while the training runs; give mesh.roles.ROLLOUT.devices devices that "
            "mesh.devices leaves out, or use stagger=1"
        )
    if config.stagger > samplers:
        raise ValueError(
            f"{stagger} is above the number of samplers, {samplers}, one for each process: use at "
            "most that, or more processes"
        )
    if config.divergence and not any(takes_policy_ratio(task.node) for task in plan.tasks):
        raise ValueError(
            f"flow.divergence={config.divergence:g} needs an update that has the policy's "
            f"log-probs beside the sampler's, and dag {plan.name!r} has none; use 0"
        )
