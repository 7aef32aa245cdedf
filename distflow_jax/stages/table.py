"""Which stage a node runs: by its role and type, or the function it names."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from distflow_jax.plugins import load_function
from distflow_jax.stages.advantage import build_advantage
from distflow_jax.stages.context import Stage, StageContext
from distflow_jax.stages.logprob import build_old_logp, build_ref_logp
from distflow_jax.stages.reward import build_reward
from distflow_jax.stages.rollout import build_rollout
from distflow_jax.stages.update import build_update

Builder = Callable[[StageContext], Stage]


class StageKind(NamedTuple):
    """A default stage, and the fields that it cannot do without, by their names inside it."""

    build: Builder
    reads: frozenset[str]
    writes: frozenset[str]
    may_write: frozenset[str] = frozenset()  # some settings of the stage add these


def _kind(build: Builder, reads: str, writes: str, may_write: str = "") -> StageKind:
    return StageKind(build, *(frozenset(names.split()) for names in (reads, writes, may_write)))


STAGES: dict[tuple[str, str], StageKind] = {
    ("ROLLOUT", "MODEL_INFERENCE"): _kind(
        build_rollout, "prompt", "response response_mask rollout_logp version finished"
    ),
    ("REWARD", "COMPUTE"): _kind(build_reward, "prompt response", "score"),
    ("ACTOR", "COMPUTE"): _kind(build_advantage, "score response_mask", "advantage", "returns"),
    ("ACTOR", "MODEL_INFERENCE"): _kind(build_old_logp, "response", "old_logp"),
    ("ACTOR", "MODEL_TRAIN"): _kind(build_update, "response advantage", ""),
    ("REFERENCE", "MODEL_INFERENCE"): _kind(build_ref_logp, "response", "ref_logp"),
}


class NodeLike(Protocol):
    """What is read of a node."""

    id: str
    role: str
    type: str
    fn: str | None
    reads: Mapping[str, str]
    writes: Mapping[str, str]


def resolve(nodes: Iterable[NodeLike]) -> dict[str, Builder]:
    """Node id -> what builds its stage.

    A node's own `fn` is a stage itself: (state, fields, options) -> (state, fields, metrics).

    Raises ValueError for a node that no stage belongs to, or that does not name the fields that its
    stage reads and writes.
    """
    builders = {}
    for node in nodes:
        if node.fn is not None:
            stage = load_function(node.fn, f"stage of node {node.id!r}")
            builders[node.id] = lambda context, stage=stage: stage
        elif (node.role, node.type) in STAGES:
            kind = STAGES[node.role, node.type]
            _check_fields(node, kind)
            builders[node.id] = kind.build
        else:
            known = ", ".join(f"{role} {kind}" for role, kind in STAGES)
            raise ValueError(
                f"node {node.id!r}: no stage for {node.role} {node.type}; there are stages for "
                f"{known}; or name your own in `fn`"
            )
    return builders


def _check_fields(node: NodeLike, kind: StageKind) -> None:
    what = f"node {node.id!r}: the stage of {node.role} {node.type}"
    if missing := sorted(kind.reads - set(node.reads)):
        raise ValueError(f"{what} reads {', '.join(missing)}: add that to the node's reads")
    if missing := sorted(kind.writes - set(node.writes)):
        raise ValueError(f"{what} writes {', '.join(missing)}: add that to the node's writes")
    if extra := sorted(set(node.writes) - kind.writes - kind.may_write):
        raise ValueError(
            f"{what} does not write {', '.join(extra)}: take that out of the node's writes"
        )
