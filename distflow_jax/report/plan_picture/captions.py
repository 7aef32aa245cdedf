"""Texts of a plan's picture: captions of boxes and wires, and titles of outlines."""

import dataclasses
from collections.abc import Collection, Mapping

from distflow_jax.dag.plan import Plan, Task
from distflow_jax.layout import Edge
from distflow_jax.programs.units import format_bytes

LOADER = "(loader)"  # not a valid id of a node
AFTER = "after"  # kind of a wire without fields
_LOOP = "loop: "  # before the title of a region

Bytes = Mapping[tuple[str | None, str], int]  # (source, field) -> bytes


@dataclasses.dataclass(frozen=True)
class Caption:
    """A wire's fields, each with its bytes if known, and the wire's tooltip."""

    source: str
    target: str
    kind: str  # the move, or AFTER
    fields: tuple[str, ...]
    title: str


def node_lines(task: Task, place: int) -> tuple[str, list[str]]:
    """(title, further lines) of a node's box."""
    node = task.node
    lines = [f"{node.role} {node.type}"]
    if node.model is not None:
        lines.append(f"model {node.model}")
    lines.append(f"scope {node.scope}, {task.layout}")
    if node.when is not None:
        every = "every step" if node.when.every == 1 else f"every {node.when.every} steps"
        lines.append(f"{every} after {node.when.after}" if node.when.after else every)
    if node.fn is not None:
        lines.append(f"fn {node.fn}")
    read = {edge.field for edge in task.edges_out}
    unread = sorted(set(node.writes.values()) - read)
    # at most two per line: a box is then no wider than for its role
    lines += ["unread: " + ", ".join(unread[i : i + 2]) for i in range(0, len(unread), 2)]
    return f"{place}. {node.id}", lines


def wire_captions(plan: Plan, sizes: Bytes | None = None) -> list[Caption]:
    """One per (source, target, move), and one per dep that neither fields nor other deps imply."""
    groups: dict[tuple[str, str, str], list[Edge]] = {}
    for task in plan.tasks:
        for edge in task.edges_in:
            key = (edge.source or LOADER, edge.target, edge.move)
            groups.setdefault(key, []).append(edge)
    captions = []
    for (source, target, move), edges in sorted(groups.items()):
        fields = tuple(_with_bytes(edge, sizes or {}) for edge in edges)
        layouts = " -> ".join(
            dict.fromkeys((str(edges[0].source_layout), str(edges[0].target_layout)))
        )
        title = f"{', '.join(fields)}: {source} -> {target}, {move}, {layouts}"
        captions.append(Caption(source, target, move, fields, title))
    drawn = {(c.source, c.target) for c in captions}
    for source, target in _bare_deps(plan, drawn):
        captions.append(Caption(source, target, AFTER, (), f"{target} waits for {source}"))
    return captions


def _with_bytes(edge: Edge, sizes: Bytes) -> str:
    size = sizes.get((edge.source, edge.field))
    return edge.field if size is None else f"{edge.field} {format_bytes(size)}"


def _bare_deps(plan: Plan, drawn: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    """Deps without fields that drawn wires do not imply."""
    before: dict[str, set[str]] = {}
    bare = []
    for task in plan.tasks:
        node = task.node
        sources = {*node.deps, *(e.source for e in task.edges_in if e.source is not None)}
        before[node.id] = sources.union(*(before[source] for source in sources))
        for dep in node.deps:
            implied = any(dep in before[other] for other in sources - {dep})
            if (dep, node.id) not in drawn and not implied:
                bare.append((dep, node.id))
    return bare


def outlines(plan: Plan) -> dict[str, str]:
    """{node: title of its outline}: its region's or its device segment's, which share no node."""
    found = dict.fromkeys(plan.region.nodes, f"{_LOOP}until {plan.region.until}")
    for number, segment in enumerate(plan.segments, 1):
        found |= {task.node.id: f"device segment {number}" for task in segment}
    return found


def is_region_title(title: str) -> bool:
    """Whether an outline is that of a region."""
    return title.startswith(_LOOP)


def role_of(plan: Plan) -> dict[str, str]:
    """{node: role}, with {LOADER: LOADER} if the loader has fields."""
    loader = {LOADER: LOADER} if plan.loader_fields else {}
    return loader | {task.node.id: task.node.role for task in plan.tasks}


def loader_lines(plan: Plan) -> list[str]:
    """Lines of the loader's box: its fields and their layouts."""
    return [f"{field} on {layout}" for field, layout in plan.loader_fields]
