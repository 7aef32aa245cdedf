"""Settings that a run with workers cannot have, found before any device works."""

from distflow_jax.dag.plan import Plan
from distflow_jax.flow.flow_config import FlowConfig
from distflow_jax.flow.served_nodes.node_checks import check_nodes


def check_workers(
    config: FlowConfig,
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
            "flow.workers=True leaves no sampler to the trainers, and mesh.roles.ROLLOUT gives "
            "samplers devices: take that out, or use workers=False"
        )
    if environment:
        raise ValueError(
            f"flow.workers=True answers in one turn, and rollout.environment={environment!r} "
            "answers in turns: use workers=False, with samplers on a part of the devices"
        )
    if eval_dataset:
        raise ValueError(
            f"flow.workers=True leaves no sampler to the trainers that could evaluate: set "
            f"eval.dataset='' in place of {eval_dataset!r}, and use `distflow evaluate`"
        )
    check_nodes(config.worker_nodes, plan, f"flow.worker_nodes={config.worker_nodes!r}")
    if plan.region is not None and config.swap == "boundary":
        raise ValueError(
            f"the region of dag {plan.name!r} has rounds with flow.swap='boundary', which workers "
            "do not make: use swap='in_flight', or workers=False"
        )
    if config.starved_seconds >= stuck_seconds:
        raise ValueError(
            f"flow.starved_seconds={config.starved_seconds:g} must be less than "
            f"health.stuck_seconds={stuck_seconds:g}, after which a run that waits is ended"
        )
