"""Settings that waves cannot run with, found before any device works."""

from distflow_jax.dag.plan import Plan
from distflow_jax.flow.flow_config import FlowConfig


def check_waves(
    config: FlowConfig,
    plan: Plan,
    *,
    own_devices: bool,
    offload: str,
    aggregation: str,
    mini_prompts: int,
) -> None:
    """Raises ValueError unless a plan can run with these settings of waves.

    `own_devices`: whether samplers have devices that no trainer uses; `aggregation`: the one in
    effect; `mini_prompts`: groups of a mini-batch.
    """
    if not config.in_waves:
        return
    waves = f"flow.waves={config.waves!r}"
    if not own_devices:
        raise ValueError(
            f"{waves} needs samplers with devices of their own: on the trainer's devices sampling "
            "and training take turns; give mesh.roles.ROLLOUT.devices devices that mesh.devices "
            "leaves out, or use waves='off'"
        )
    if offload != "none":
        raise ValueError(
            f"{waves} would move models with training.offload={offload!r} for each wave; use "
            "offload='none', or waves='off'"
        )
    if config.waves == "ready" and aggregation == "fixed-budget":
        raise ValueError(
            f"{waves} trains on what is complete first, and what lies within the budget of "
            "algorithm.aggregation='fixed-budget' follows from all earlier responses; use "
            "waves='counter'"
        )
    if config.wave_prompts > mini_prompts:
        raise ValueError(
            f"flow.wave_prompts={config.wave_prompts} is above the {mini_prompts} groups of a "
            "mini-batch (data.prompts_per_step / training.mini_batches), in which a wave lies; use "
            "less, or waves='off'"
        )
    if not any(task.node.type == "MODEL_TRAIN" for task in plan.tasks):
        raise ValueError(f"{waves} needs a node that trains, and dag {plan.name!r} has none")
