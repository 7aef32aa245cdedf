"""Which nodes of a plan run wave by wave, and which wait for the whole batch, with the reason."""

from collections.abc import Mapping

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.dag.plan import Plan, Task, Unit
from distflow_jax.dag.proximal_weights import NODE as TOKEN_AGE
from distflow_jax.programs.text_table import fill_lines
from distflow_jax.stages.advantage import build_advantage
from distflow_jax.stages.registry import kind_of

STREAMS = "streams"  # the reason of a node that does not wait

_WHITENS = "whitens over the tokens of the step"
# estimators of advantages that need more than a group, by algorithm.advantage
_ADVANTAGES = {
    "gae": _WHITENS,
    "reinforce_plus_plus": _WHITENS,
    "reinforce_plus_plus_baseline": _WHITENS,
    "gpg": "counts the sequences of the step whose score is not 0",
}


def streamed_nodes(
    plan: Plan, needs_batch: Mapping[str, str], *, mini_batches: int = 1, epochs: int = 1
) -> dict[str, str]:
    """Node id -> STREAMS, or why it waits for the whole batch. Pure; in the plan's order.

    A node waits if it needs the batch by itself, if it reads what a node that waits writes, if it
    uses weights that change only at the end of the step, or if it shares a program with such a
    node. `needs_batch`: reasons that follow from settings, by node id.
    """
    reasons: dict[str, str] = {}
    for unit in plan.units:
        found = {t.node.id: _reason(t, plan, unit, reasons, needs_batch) for t in unit.tasks}
        updates = mini_batches * epochs
        for task in unit.tasks:
            if not found[task.node.id] and task.node.type == "MODEL_TRAIN" and updates > 1:
                found[task.node.id] = _of_updates(task, plan, mini_batches, epochs)
        late = [name for name, reason in found.items() if reason]
        for name, reason in found.items():
            reasons[name] = reason or (f"one program with {late[0]}, which waits" if late else "")
    return {name: f"waits: {reason}" if reason else STREAMS for name, reason in reasons.items()}


def described(streamed: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """A column of the plan's table by node id, and lines with the reasons of nodes that wait."""
    column = {name: text.split(":")[0] for name, text in streamed.items()}
    late = {name: text for name, text in streamed.items() if text != STREAMS}
    lines = [
        f"{name} {text.replace('waits:', 'waits for the whole batch:', 1)}"
        for name, text in late.items()
    ]
    return column, fill_lines("".join(f"{line}\n" for line in lines))


def streamed_units(plan: Plan, streamed: Mapping[str, str]) -> tuple[Unit, ...]:
    """The units that run wave by wave, of a plan with the nodes that `streamed_nodes` found."""
    return tuple(
        unit for unit in plan.units if all(streamed[task.node.id] == STREAMS for task in unit.tasks)
    )


def advantages_that_wait(plan: Plan, algorithm: AlgorithmConfig) -> dict[str, str]:
    """Node id -> reason, for the built-in advantages whose estimator needs the whole batch."""
    reason = _ADVANTAGES.get(algorithm.advantage, "")
    if algorithm.advantage == "cpgd" and algorithm.cpgd_weight == "clip_filter":
        reason = "counts the groups of the step whose scores differ"
    text = f"algorithm.advantage={algorithm.advantage!r} {reason}" if reason else ""
    if algorithm.kl_target:
        text = f"algorithm.kl_target={algorithm.kl_target:g} takes the KL of the whole step"
    if not text:
        return {}
    return {task.node.id: text for task in plan.tasks if _is_advantage(task)}


def _reason(
    task: Task,
    plan: Plan,
    unit: Unit,
    reasons: Mapping[str, str],
    needs_batch: Mapping[str, str],
) -> str:
    """Why a node waits, apart from its own optimizer steps; "": it does not."""
    node = task.node
    own = node.fn is not None and ":" in node.fn
    if node.id in needs_batch:
        return needs_batch[node.id]
    if node.type == "MODEL_TRAIN" and own:
        return f"{node.fn} updates a model by itself"
    if node.scope == "batch" and node.type != "MODEL_TRAIN" and node.fn != TOKEN_AGE:
        return "scope batch"
    for edge in task.edges_in:
        if edge.source is not None and reasons.get(edge.source):
            return f"reads {edge.field} of {edge.source}, which waits"
    before = [t for t in plan.tasks if t.node.id in reasons and t.node.type == "MODEL_TRAIN"]
    for trainer in before:
        if trainer.state_key == task.state_key:
            return f"uses the weights that {trainer.node.id} trains in the same step"
    return ""


def _of_updates(task: Task, plan: Plan, mini_batches: int, epochs: int) -> str:
    """Why a node that trains waits because of its several optimizer steps; "": it does not."""
    if epochs > 1:
        return f"training.epochs={epochs} passes over the batch"
    for other in plan.tasks:
        if other.state_key == task.state_key and other.node.type != "MODEL_TRAIN":
            return (
                f"training.mini_batches={mini_batches} would change the weights that "
                f"{other.node.id} uses"
            )
    return ""


def _is_advantage(task: Task) -> bool:
    own = task.node.fn is not None and ":" in task.node.fn
    return not own and kind_of(task.node).build is build_advantage
