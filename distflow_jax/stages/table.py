"""Which stage a node runs: by its role and type, or the function it names."""

from collections.abc import Callable, Iterable
from typing import Protocol

from distflow_jax.plugins import load_function
from distflow_jax.stages.advantage import build_advantage
from distflow_jax.stages.context import Stage, StageContext
from distflow_jax.stages.logprob import build_old_logp, build_ref_logp
from distflow_jax.stages.reward import build_reward
from distflow_jax.stages.rollout import build_rollout
from distflow_jax.stages.update import build_update

STAGES: dict[tuple[str, str], Callable[[StageContext], Stage]] = {
    ("ROLLOUT", "MODEL_INFERENCE"): build_rollout,
    ("REWARD", "COMPUTE"): build_reward,
    ("ACTOR", "COMPUTE"): build_advantage,
    ("ACTOR", "MODEL_INFERENCE"): build_old_logp,
    ("ACTOR", "MODEL_TRAIN"): build_update,
    ("REFERENCE", "MODEL_INFERENCE"): build_ref_logp,
}


class NodeLike(Protocol):
    """What is read of a node."""

    id: str
    role: str
    type: str
    fn: str | None


def resolve(nodes: Iterable[NodeLike]) -> dict[str, Callable[[StageContext], Stage]]:
    """Node id -> what builds its stage. ValueError for a node that no stage belongs to.

    A node's own `fn` is a stage itself: (state, fields, options) -> (state, fields, metrics).
    """
    builders = {}
    for node in nodes:
        if node.fn is not None:
            stage = load_function(node.fn, f"stage of node {node.id!r}")
            builders[node.id] = lambda context, stage=stage: stage
        elif (node.role, node.type) in STAGES:
            builders[node.id] = STAGES[node.role, node.type]
        else:
            known = ", ".join(f"{role} {kind}" for role, kind in STAGES)
            raise ValueError(
                f"node {node.id!r}: no stage for {node.role} {node.type}; there are stages for "
                f"{known}; or name your own in `fn`"
            )
    return builders
