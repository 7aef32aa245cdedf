"""Nodes of a plan that run on each partial batch, and why others wait for the whole batch."""

from collections.abc import Mapping

from distflow_jax.algorithms.whole_batch import advantage_waits, update_waits
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.dag.added_fields import NODE as TOKEN_AGE
from distflow_jax.dag.graph import Node
from distflow_jax.dag.plan import Plan, Task, Unit
from distflow_jax.layout import KEEP
from distflow_jax.programs.text_table import fill_lines
from distflow_jax.stages.advantage import build_advantage
from distflow_jax.stages.registry import kind_of, takes_policy_ratio
from distflow_jax.stream.checks import nodes_ahead

STREAMS = "streams"  # the reason of a node that does not wait


def streamed_nodes(
    plan: Plan, needs_batch: Mapping[str, str], *, mini_batches: int = 1
) -> dict[str, str]:
    """Node id -> STREAMS, or why it waits for the whole batch. Pure; in the plan's order.

    A node waits if it needs the batch by itself, if a node that it depends on waits, if it uses
    weights that change only at the end of the step, or if it shares a program with such a node.
    `needs_batch`: reasons that follow from settings, by node id.
    """
    ahead = {node.id for node in nodes_ahead(plan)}
    reasons: dict[str, str] = {}
    for unit in plan.units:
        found = {}
        for task in unit.tasks:
            node = task.node
            reason = needs_batch.get(node.id, "") or _own_reason(node, node.id in ahead)
            reason = reason or _reason_of_others(task, plan, reasons)
            if not reason and node.type == "MODEL_TRAIN" and mini_batches > 1:
                reason = _of_mini_batches(task, plan, mini_batches)
            found[node.id] = reason
        late = [name for name, reason in found.items() if reason]
        for name, reason in found.items():
            reasons[name] = reason or (f"one program with {late[0]}, which waits" if late else "")
    return {name: f"waits: {reason}" if reason else STREAMS for name, reason in reasons.items()}


def nodes_that_need_the_batch(
    plan: Plan, algorithm: AlgorithmConfig, *, mini_batches: int = 1, epochs: int = 1
) -> dict[str, str]:
    """Node id -> reason, of built-in stages whose settings need the whole batch."""
    found = {}
    for node in (task.node for task in plan.tasks):
        if _is_own(node):
            continue
        if kind_of(node).build is build_advantage:
            found[node.id] = advantage_waits(algorithm)
        if node.type == "MODEL_TRAIN":
            of_policy = algorithm if takes_policy_ratio(node) else None
            found[node.id] = update_waits(of_policy, mini_batches, epochs)
    return {name: reason for name, reason in found.items() if reason}


def described(streamed: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """A column of the plan's table by node id, and lines with the reasons of nodes that wait."""
    column = {name: text.split(":")[0] for name, text in streamed.items()}
    late = {name: text for name, text in streamed.items() if text != STREAMS}
    lines = [
        f"{name} {text.replace('waits:', 'waits for the whole batch:', 1)}\n"
        for name, text in late.items()
    ]
    return column, fill_lines("".join(lines))


def streamed_units(plan: Plan, streamed: Mapping[str, str]) -> tuple[Unit, ...]:
    """The units that run partial batch by partial batch, of a plan with the nodes that
    `streamed_nodes` found."""
    return tuple(
        unit for unit in plan.units if all(streamed[task.node.id] == STREAMS for task in unit.tasks)
    )


def _own_reason(node: Node, ahead: bool) -> str:
    """Why a node needs the whole batch by itself; "": it does not."""
    if node.type == "MODEL_TRAIN":
        return f"{node.fn} updates a model by itself" if _is_own(node) else ""
    if node.scope == "batch" and node.fn != TOKEN_AGE:
        return "scope batch"
    if KEEP in node.writes.values() and not ahead:
        return "chooses responses of the batch"
    return ""


def _reason_of_others(task: Task, plan: Plan, reasons: Mapping[str, str]) -> str:
    """Why a node waits for nodes before it, which have these reasons; "": it does not."""
    for edge in task.edges_in:
        if edge.source is not None and reasons.get(edge.source):
            return f"reads {edge.field} of {edge.source}, which waits"
    before = [t for t in plan.tasks if t.node.id in reasons and t.node.type == "MODEL_TRAIN"]
    for trainer in before:
        if trainer.state_key == task.state_key:
            return f"uses the weights that {trainer.node.id} trains in the same step"
    # rows, chosen responses and weights change without an edge: deps alone say the order
    for name in (*task.node.deps, *_region_before(task, plan)):
        if reasons.get(name):
            return f"comes after {name}, which waits"
    return ""


def _region_before(task: Task, plan: Plan) -> list[str]:
    """Ids of the plan's region, which all nodes outside it follow."""
    inside = list(plan.region.nodes)
    return [] if task.node.id in inside else inside


def _of_mini_batches(task: Task, plan: Plan, mini_batches: int) -> str:
    """Why a node that trains waits because of its several optimizer steps; "": it does not."""
    for other in plan.tasks:
        if other.state_key == task.state_key and other.node.type != "MODEL_TRAIN":
            return (
                f"training.mini_batches={mini_batches} would change the weights that "
                f"{other.node.id} uses"
            )
    return ""


def _is_own(node: Node) -> bool:
    """Whether a node names a function of the user's."""
    return node.fn is not None and ":" in node.fn
