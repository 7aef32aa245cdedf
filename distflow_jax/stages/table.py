"""Which stage a node runs: by its role and type, by a built-in name, or the function it names."""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from distflow_jax.hints import hint
from distflow_jax.plugins import load_function
from distflow_jax.stages.advantage import build_advantage
from distflow_jax.stages.combine import build_weighted_sum
from distflow_jax.stages.context import NodeLike, Stage, StageContext
from distflow_jax.stages.logprob import build_old_logp, build_ref_logp
from distflow_jax.stages.pairs import build_choose_pairs
from distflow_jax.stages.reward import build_reward
from distflow_jax.stages.rollout import build_rollout
from distflow_jax.stages.update import build_update
from distflow_jax.training.loss import AlgorithmConfig

Builder = Callable[[StageContext], Stage]


@dataclasses.dataclass(frozen=True)
class Demands:
    """What a run asks of its stages, beyond what they cannot do without."""

    algorithm: AlgorithmConfig
    updates: int  # optimizer steps that a batch gets

    def of(self, node: NodeLike) -> dict[str, str]:
        """{field inside the stage: why it is needed} of a node that runs a default stage."""
        if node.fn is not None or (node.role, node.type) != ("ACTOR", "MODEL_TRAIN"):
            return {}
        wanted = {}
        if self.algorithm.kl_coef > 0:
            wanted["ref_logp"] = "algorithm.kl_coef is above 0"
        if self.updates > 1:
            wanted["old_logp"] = (
                f"a batch gets {self.updates} optimizer steps (training.mini_batches x "
                "training.epochs)"
            )
        return wanted


class StageKind(NamedTuple):
    """A built-in stage: the fields that it cannot do without, and those that it writes if asked.

    `reads` None: the names are the node's own.
    """

    build: Builder
    reads: frozenset[str] | None
    writes: frozenset[str]
    may_write: frozenset[str]


def _kind(build: Builder, reads: str | None, writes: str, may_write: str = "") -> StageKind:
    needs = None if reads is None else frozenset(reads.split())
    return StageKind(build, needs, frozenset(writes.split()), frozenset(may_write.split()))


STAGES: dict[tuple[str, str], StageKind] = {
    ("ROLLOUT", "MODEL_INFERENCE"): _kind(
        build_rollout, "prompt", "response", "response_mask rollout_logp version finished"
    ),
    ("REWARD", "COMPUTE"): _kind(build_reward, "prompt response", "score", "unshaped_score"),
    ("ACTOR", "COMPUTE"): _kind(build_advantage, "score response_mask", "advantage"),
    ("ACTOR", "MODEL_INFERENCE"): _kind(build_old_logp, "response", "old_logp"),
    ("ACTOR", "MODEL_TRAIN"): _kind(build_update, "response advantage", ""),
    ("REFERENCE", "MODEL_INFERENCE"): _kind(build_ref_logp, "response", "ref_logp"),
}

# by the name that a node gives in `fn`
NAMED: dict[str, StageKind] = {
    "choose_pairs": _kind(build_choose_pairs, "prompt score", "keep"),
    "weighted_sum": _kind(build_weighted_sum, None, "score"),
}


def resolve(nodes: Iterable[NodeLike]) -> dict[str, Builder]:
    """Node id -> what builds its stage.

    A function that a node names in `fn` is a stage itself: (state, fields, options) -> (state,
    fields, metrics).

    Raises ValueError for a node that no stage belongs to, or that does not name the fields that its
    stage reads and writes.
    """
    builders = {}
    for node in nodes:
        if node.fn is not None and ":" in node.fn:
            stage = load_function(node.fn, f"stage of node {node.id!r}")
            builders[node.id] = lambda context, stage=stage: stage
            continue
        kind = kind_of(node)
        _check_fields(node, kind)
        builders[node.id] = kind.build
    return builders


def kind_of(node: NodeLike) -> StageKind:
    """The built-in stage of a node that names no function of its own."""
    if node.fn is not None:
        if node.fn not in NAMED:
            raise ValueError(
                f"node {node.id!r}: no built-in stage is called {node.fn!r} "
                f"({hint(node.fn, NAMED)}); a function of your own is module:function or "
                "file.py:function"
            )
        return NAMED[node.fn]
    if (node.role, node.type) not in STAGES:
        known = ", ".join(f"{role} {kind}" for role, kind in STAGES)
        raise ValueError(
            f"node {node.id!r}: no stage for {node.role} {node.type}; there are stages for "
            f"{known}; or name your own in `fn`"
        )
    return STAGES[node.role, node.type]


def wanted_reads(nodes: Iterable[NodeLike], demands: Demands) -> dict[str, Collection[str]]:
    """Node id -> those of the fields that it may read that this run needs it to read.

    Raises ValueError if a node has no way to what it needs.
    """
    wanted = {}
    for node in nodes:
        asked = demands.of(node)
        for field, why in asked.items():
            if field not in node.reads and field not in node.may_read:
                raise ValueError(
                    f"node {node.id!r}: reads no {field!r}, but {why}: add it to its may_read, and "
                    "a node that writes it"
                )
        wanted[node.id] = list(asked)
    return wanted


def _check_fields(node: NodeLike, kind: StageKind) -> None:
    what = f"node {node.id!r}: the stage of {node.fn or f'{node.role} {node.type}'}"
    if kind.reads is not None and (missing := sorted(kind.reads - set(node.reads))):
        raise ValueError(f"{what} reads {', '.join(missing)}: add that to the node's reads")
    if missing := sorted(kind.writes - set(node.writes)):
        raise ValueError(f"{what} writes {', '.join(missing)}: add that to the node's writes")
    if extra := sorted(set(node.writes) - kind.writes - kind.may_write):
        raise ValueError(
            f"{what} does not write {', '.join(extra)}: take that out of the node's writes"
        )
