"""The stage of a node: by its role and type, by a built-in name, or the function it names."""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from distflow_jax.config.algorithm_config import AlgorithmConfig, PreferenceConfig
from distflow_jax.dag.added_fields import (
    AGE,
    ALPHA,
    with_ages,
    with_environment_rewards,
    with_router_replay,
)
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.did_you_mean import hint
from distflow_jax.layout import RESPONSE_IMAGES, ROUTED_EXPERTS, ROWS, ROWS_COLUMNS
from distflow_jax.parsing.checked_fields import FLAG, OBJECT, TEXT, Kind, check_fields
from distflow_jax.stages.advantage import advantage_reads, build_advantage, first_coefficient
from distflow_jax.stages.predictions import (
    build_old_logp,
    build_ref_logp,
    build_scores,
    build_values,
)
from distflow_jax.stages.reward import build_reward, build_token_age
from distflow_jax.stages.rollout import build_rollout
from distflow_jax.stages.score_choices import build_choose_pairs, build_weighted_sum
from distflow_jax.stages.stage_context import (
    ComputeContext,
    ModelContext,
    NodeContext,
    SamplingContext,
    TrainContext,
)
from distflow_jax.stages.update_model import (
    build_kto_update,
    build_policy_update,
    build_preference_update,
    build_reward_model_update,
    build_sft_update,
    build_value_update,
    update_reads,
)
from distflow_jax.user_functions import load_function

Builder = Callable[[Any], Stage]  # of the record that StageKind.context names


@dataclasses.dataclass(frozen=True)
class Demands:
    """The fields that a run's settings require of its stages, beyond those always read."""

    algorithm: AlgorithmConfig
    preference: PreferenceConfig
    updates: int  # optimizer steps that a batch gets
    ahead: bool = False  # whether samplers run ahead
    environment: bool = False
    router_replay: bool = False

    def of(self, node: Node) -> dict[str, str]:
        """{field inside the stage: why it is needed} of a node that runs a default stage."""
        if node.fn is not None:
            return {}
        algorithm, kind = self.algorithm, kind_of(node)
        if kind.build is build_advantage:
            why = f"algorithm.advantage={algorithm.advantage!r}"
            if algorithm.kl_in_reward:
                why += " with algorithm.kl_in_reward"
            return dict.fromkeys(advantage_reads(algorithm), f"{why} needs it")
        if kind.build is build_preference_update and self.preference.reads_reference:
            return {"ref_logp": f"preference.loss={self.preference.loss!r} needs it"}
        if kind.build is not build_policy_update:
            return {}
        wanted = dict.fromkeys(update_reads(algorithm), "what the section algorithm asks for")
        if algorithm.kl_in_loss:
            wanted["ref_logp"] = "algorithm.kl_coef is above 0"
        if self.updates > 1 and algorithm.proximal == "recomputed":
            wanted["old_logp"] = (
                f"a batch gets {self.updates} optimizer steps (training.mini_batches x "
                "training.epochs)"
            )
        return wanted


class StageKind(NamedTuple):
    """A built-in stage: its builder, the record that this takes, and the fields of the stage.

    `reads` and `writes` are those that it cannot do without, `may_write` those that it writes if
    the node names them. `reads` None: the names are the node's own. `per_token`: those that it
    writes on the host with one number per response token, not one per response. `first_state`
    makes the state that a node with one of its own begins with.
    """

    build: Builder
    context: type[NodeContext]
    reads: frozenset[str] | None
    writes: frozenset[str]
    may_write: frozenset[str]
    per_token: frozenset[str] = frozenset()
    first_state: Callable[[Any], Any] | None = None


def _kind(
    build: Builder,
    context: type[NodeContext],
    reads: str | None,
    writes: str,
    may_write: str = "",
    *,
    per_token: str = "",
    first_state: Callable[[Any], Any] | None = None,
) -> StageKind:
    return StageKind(
        build,
        context,
        None if reads is None else frozenset(reads.split()),
        frozenset(writes.split()),
        frozenset(may_write.split()),
        frozenset(per_token.split()),
        first_state,
    )


STAGES: dict[tuple[str, str], StageKind] = {
    ("ROLLOUT", "MODEL_INFERENCE"): _kind(
        build_rollout,
        SamplingContext,
        "uid prompt",
        "response",
        f"response_mask rollout_logp version finished environment_reward {ROUTED_EXPERTS} "
        f"{RESPONSE_IMAGES}",
        per_token="rollout_logp version",
    ),
    ("REWARD", "COMPUTE"): _kind(
        build_reward, ComputeContext, "uid prompt response", "score", "unshaped_score"
    ),
    ("REWARD", "MODEL_INFERENCE"): _kind(build_scores, ModelContext, "rows", "score"),
    ("REWARD", "MODEL_TRAIN"): _kind(build_reward_model_update, TrainContext, "rows", ""),
    ("ACTOR", "COMPUTE"): _kind(
        build_advantage,
        ComputeContext,
        "score rows",
        "advantage",
        "returns",
        first_state=first_coefficient,
    ),
    ("ACTOR", "MODEL_INFERENCE"): _kind(build_old_logp, ModelContext, "rows", "old_logp"),
    ("ACTOR", "MODEL_TRAIN"): _kind(build_policy_update, TrainContext, "rows advantage", ""),
    ("CRITIC", "MODEL_INFERENCE"): _kind(build_values, ModelContext, "rows", "value"),
    ("CRITIC", "MODEL_TRAIN"): _kind(build_value_update, TrainContext, "rows value returns", ""),
    ("REFERENCE", "MODEL_INFERENCE"): _kind(build_ref_logp, ModelContext, "rows", "ref_logp"),
}

# of ACTOR MODEL_TRAIN, by options.objective
OBJECTIVES: dict[str, StageKind] = {
    "policy": STAGES["ACTOR", "MODEL_TRAIN"],
    "preference": _kind(build_preference_update, TrainContext, "rows", ""),
    "kto": _kind(build_kto_update, TrainContext, "rows ref_logp label", ""),
    "sft": _kind(build_sft_update, TrainContext, "rows", ""),
}

# by the name that a node gives in `fn`
NAMED: dict[str, StageKind] = {
    "token_age": _kind(
        build_token_age,
        ComputeContext,
        "version step",
        "",
        "age prox_alpha",
        per_token="age prox_alpha",
    ),
    "choose_pairs": _kind(build_choose_pairs, ComputeContext, "uid score", "keep"),
    "weighted_sum": _kind(build_weighted_sum, ComputeContext, None, "score"),
}


def resolve(nodes: Iterable[Node]) -> dict[str, Builder]:
    """Node id -> the builder of its stage, which takes the record that `context_of` names.

    A function that a node names in `fn` is a stage itself: (state, fields, options) -> (state,
    fields, metrics).

    Raises ValueError for a node that no stage belongs to, or that does not name the fields that its
    stage reads and writes.
    """
    builders = {}
    for node in nodes:
        if not node.is_users:
            kind = kind_of(node)
            _check_fields(node, kind)
            _check_options(node, kind)
            builders[node.id] = kind.build
            continue
        stage = load_function(node.fn, f"stage of node {node.id!r}")
        builders[node.id] = lambda context, stage=stage: stage
    return builders


def kind_of(node: Node) -> StageKind:
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
    if (node.role, node.type) == ("ACTOR", "MODEL_TRAIN"):
        objective = node.options.get("objective", "policy")
        if objective not in OBJECTIVES:
            raise ValueError(
                f"node {node.id!r}: unknown options.objective {objective!r} "
                f"({hint(objective, OBJECTIVES)})"
            )
        return OBJECTIVES[objective]
    return STAGES[node.role, node.type]


def takes_policy_ratio(node: Node) -> bool:
    """Whether a node's update weighs tokens by how likely the policy was to sample them."""
    return not node.is_users and kind_of(node).build is build_policy_update


_OPTIONS: dict[Builder, dict[str, Kind]] = {  # of a node, by its stage
    build_rollout: {"greedy": FLAG},
    build_weighted_sum: {"weights": OBJECT},
}
# the section of the config that a stage reads
_SECTIONS: dict[Builder, str] = {
    build_advantage: "algorithm",
    build_policy_update: "algorithm",
    build_token_age: "algorithm",
    build_value_update: "critic",
    build_preference_update: "preference",
    build_kto_update: "preference",
    build_reward_model_update: "reward_model",
}


def sections_read(nodes: Iterable[Node]) -> set[str]:
    """The sections of the config that built-in stages of these nodes read, of those that belong to
    an algorithm."""
    builders = [kind_of(node).build for node in nodes if not node.is_users]
    return {_SECTIONS[build] for build in builders if build in _SECTIONS}


def per_token_fields(node: Node) -> set[str]:
    """The fields that a node on the host writes with one number per response token."""
    inside = node.per_token
    if not node.is_users:
        inside = kind_of(node).per_token & set(node.writes)
    return {node.writes[name] for name in inside}


def context_of(node: Node) -> type[NodeContext] | None:
    """The record that a node's builder takes; None for a function of the user's, a stage itself."""
    return None if node.is_users else kind_of(node).context


def first_state_of(node: Node, context: NodeContext | None) -> Any:
    """The first state of a node that has one of its own; None: there is none, or the node makes it.

    `context` is the record that `context_of` names.
    """
    make = None if node.is_users else kind_of(node).first_state
    return make(context) if make else None


def settle_graph(graph: Graph, demands: Demands) -> Graph:
    """The graph with the fields and the optional reads that the run needs, and with a stage for
    every node.

    Raises ValueError for a read that has no writer, and as `resolve` does.
    """
    ages = {ALPHA: ALPHA in update_reads(demands.algorithm), AGE: demands.ahead}
    changes = (  # (whether the run needs it, change of the graph)
        (demands.environment, with_environment_rewards),
        (demands.router_replay, with_router_replay),
    )
    for needed, change in changes:
        graph = change(graph) if needed else graph
    graph = with_ages(graph, [name for name, asked in ages.items() if asked])
    wanted = _wanted_reads(graph.nodes, demands)
    graph = graph.settle(wanted)
    resolve(graph.nodes)
    return graph


def _wanted_reads(nodes: Iterable[Node], demands: Demands) -> dict[str, Collection[str]]:
    """Node id -> those of the fields that it may read that this run needs it to read.

    Raises ValueError if a node has no way to what it needs.
    """
    wanted = {}
    for node in nodes:
        if node.may_read and node.fn is not None:
            raise ValueError(
                f"node {node.id!r}: only default stages know what they may_read; "
                f"{node.fn!r} needs {', '.join(node.may_read)} in reads, or not at all"
            )
        asked = demands.of(node)
        for field, why in asked.items():
            if field not in node.reads and field not in node.may_read:
                _check_rows(node, [field])
                raise ValueError(
                    f"node {node.id!r}: reads no {field!r}, but {why}: choose a dag that "
                    "has it, or add it to the node's may_read, and a node that writes it"
                )
        wanted[node.id] = list(asked)
    return wanted


def _check_options(node: Node, kind: StageKind) -> None:
    """Raises ValueError for an option that the stage of a node does not have."""
    known = _OPTIONS.get(kind.build, {})
    if (node.role, node.type) == ("ACTOR", "MODEL_TRAIN"):
        known = {"objective": TEXT}
    if node.role != "ROLLOUT" and node.type != "COMPUTE":
        known = {**known, "checkpoint": TEXT}  # of any model, where its weights come from
    for option in node.options:
        if option not in known:
            raise ValueError(
                f"node {node.id!r}: its stage has no option {option!r} ({hint(option, known)})"
            )
    check_fields(node.options, known, f"node {node.id!r}: options")


def _check_fields(node: Node, kind: StageKind) -> None:
    what = f"node {node.id!r}: the stage of {node.fn or f'{node.role} {node.type}'}"
    if kind.reads is not None and (missing := sorted(kind.reads - set(node.reads))):
        _check_rows(node, missing)
        raise ValueError(f"{what} reads {', '.join(missing)}: add that to the node's reads")
    if missing := sorted(kind.writes - set(node.writes)):
        raise ValueError(f"{what} writes {', '.join(missing)}: add that to the node's writes")
    if extra := sorted(set(node.writes) - kind.writes - kind.may_write):
        raise ValueError(
            f"{what} does not write {', '.join(extra)}: take that out of the node's writes"
        )


def _check_rows(node: Node, missing: Collection[str]) -> None:
    """ValueError for a node that reads the host's columns where its stage reads rows."""
    columns = [name for name in ROWS_COLUMNS if name in node.reads]
    if ROWS in missing and columns:
        raise ValueError(
            f"node {node.id!r}: runs on a mesh, where prompts and responses are packed: write "
            f"{ROWS} in place of {', '.join(columns)} in its reads"
        )
