"""From a graph and the layout of each role to the plan that every process walks.

`plan` is a pure function. Its result does not depend on the order in which nodes are listed, nor
on the hash seed: all processes compute it for themselves and compare digests at start.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from distflow_jax.dag.graph import ROLES, SCOPES, TYPES, Graph, Node, hint
from distflow_jax.types import Edge, Layout, move_between

HOST = Layout("host")


@dataclasses.dataclass(frozen=True)
class Task:
    """A node in its place in the plan.

    `edges_in` has one edge per field that the node reads, `edges_out` one per reader of a field
    that it writes. `frees` lists the (source, field) values that nobody needs after this task; a
    source of None is the loader. `state_key` says which state the stage is handed: that of the
    model instance, or the node's own small one.
    """

    node: Node
    depth: int
    state_key: str
    layout: Layout
    edges_in: tuple[Edge, ...]
    edges_out: tuple[Edge, ...]
    frees: tuple[tuple[str | None, str], ...]

    def to_tree(self) -> dict[str, Any]:
        """The task as plain JSON values."""
        node = dataclasses.asdict(self.node)
        node["when"] = dataclasses.asdict(self.node.condition)
        return {
            "node": node,
            "depth": self.depth,
            "state_key": self.state_key,
            "layout": dataclasses.asdict(self.layout),
            "edges_in": [dataclasses.asdict(edge) for edge in self.edges_in],
            "edges_out": [dataclasses.asdict(edge) for edge in self.edges_out],
            "frees": self.frees,
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tasks in the order in which every process runs them, and the device tasks that may be fused.

    `given` are the fields that the loader gives, with the layout in which it gives them.
    """

    name: str
    given: tuple[tuple[str, Layout], ...]
    tasks: tuple[Task, ...]
    segments: tuple[tuple[Task, ...], ...]

    def to_json(self) -> str:
        """Canonical JSON: equal plans give equal text, on every process."""
        tree = {
            "name": self.name,
            "given": [[name, dataclasses.asdict(layout)] for name, layout in self.given],
            "tasks": [task.to_tree() for task in self.tasks],
            "segments": [[task.node.id for task in segment] for segment in self.segments],
        }
        return json.dumps(tree, sort_keys=True, separators=(",", ":"))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of to_json(), in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def describe(self) -> str:
        """The plan as a table for people."""
        nodes = [("#", "depth", "node", "role", "type", "model", "layout", "writes")]
        reads = [("node", "reads", "from", "move")]
        for place, task in enumerate(self.tasks, 1):
            node = task.node
            where = (str(place), str(task.depth), node.id, node.role, node.type, node.model or "-")
            nodes.append((*where, str(task.layout), ", ".join(node.writes.values()) or "-"))
            fields: dict[tuple[str, str], list[str]] = {}  # (from, move) -> fields
            for edge in task.edges_in:
                way = (edge.source or "(loader)", _describe_move(edge))
                fields.setdefault(way, []).append(edge.field)
            reads += [(node.id, ", ".join(names), *way) for way, names in fields.items()]
        segments = " | ".join(" + ".join(t.node.id for t in part) for part in self.segments)
        return (
            f"plan {self.name}, digest {self.digest[:12]}\n\n{_table(nodes)}\n\n{_table(reads)}\n\n"
            f"device segments: {segments or 'none'}\n"
        )


def plan(
    graph: Graph,
    layouts: Mapping[str, Layout],
    given_fields: Mapping[str, Layout] | Collection[str],
) -> Plan:
    """Orders the nodes of a graph and decides how each field travels.

    `layouts` are keyed by role or by model instance; the instance wins. `given_fields` are what the
    loader gives, on the host where no layout is named. Raises ValueError, with the node and what to
    change, for whatever would make the result depend on luck.
    """
    if not isinstance(given_fields, Mapping):
        given_fields = dict.fromkeys(given_fields, HOST)
    depths = _depths(graph)
    placed = {node.id: _layout_of(node, layouts) for node in graph.nodes}
    order = sorted(graph.nodes, key=lambda node: _place(node, depths[node.id], placed[node.id]))
    ancestors = _ancestors(order)
    _check_states(order, ancestors, placed)
    _check_writers(order, ancestors)

    edges: list[Edge] = []
    for node in order:
        for field in sorted(set(node.reads.values())):
            source = _source_of(node, field, order, ancestors, given_fields)
            start = given_fields[field] if source is None else placed[source]
            move = move_between(start, placed[node.id])
            edges.append(Edge(field, source, node.id, start, placed[node.id], move))
    frees = _last_uses(order, edges, given_fields)
    tasks = tuple(
        Task(
            node=node,
            depth=depths[node.id],
            state_key=_state_key(node),
            layout=placed[node.id],
            edges_in=tuple(edge for edge in edges if edge.target == node.id),
            edges_out=tuple(edge for edge in edges if edge.source == node.id),
            frees=frees[node.id],
        )
        for node in order
    )
    return Plan(graph.name, tuple(sorted(given_fields.items())), tasks, _segments(tasks))


# -- order ------------------------------------------------------------------------------------


def _depths(graph: Graph) -> dict[str, int]:
    """The longest chain of deps above each node."""
    depths: dict[str, int] = {}
    while len(depths) < len(graph.nodes):  # ends, since the graph has no cycle
        for node in graph.nodes:
            if all(dep in depths for dep in node.deps):
                depths[node.id] = 1 + max((depths[dep] for dep in node.deps), default=-1)
    return depths


def _place(node: Node, depth: int, layout: Layout) -> tuple:
    """Sort key. Device work before host work: it is issued without waiting, and runs meanwhile."""
    place = (depth, layout.kind == "host", layout.axes, ROLES.index(node.role))
    return place + (TYPES.index(node.type), node.model or "", node.id)


def _ancestors(order: Iterable[Node]) -> dict[str, set[str]]:
    ancestors: dict[str, set[str]] = {}
    for node in order:
        ancestors[node.id] = set(node.deps).union(*(ancestors[dep] for dep in node.deps))
    return ancestors


def _ordered(a: Node, b: Node, ancestors: Mapping[str, set[str]]) -> bool:
    return a.id in ancestors[b.id] or b.id in ancestors[a.id] or a.id == b.id


# -- layouts and states -----------------------------------------------------------------------


def _layout_of(node: Node, layouts: Mapping[str, Layout]) -> Layout:
    for key in (node.model, node.role):
        if key in layouts:
            return layouts[key]
    wanted = node.role if node.model is None else f"{node.role} or model {node.model}"
    raise ValueError(
        f"node {node.id!r}: no layout for {wanted} ({hint(node.role, layouts)}): "
        "give it one in the mesh section"
    )


def _state_key(node: Node) -> str:
    if node.model is not None:
        return node.model
    return node.id if node.type == "COMPUTE" else node.role.lower()


def _check_states(
    order: list[Node], ancestors: Mapping[str, set[str]], placed: Mapping[str, Layout]
) -> None:
    """One state lies in one place, and who trains it is ordered against who uses it."""
    for i, a in enumerate(order):
        for b in order[i + 1 :]:
            key = _state_key(a)
            if key != _state_key(b):
                continue
            own = [node for node in (a, b) if node.model is None and node.type == "COMPUTE"]
            if own:
                other = b if own[0] is a else a
                raise ValueError(
                    f"node {own[0].id!r}: its id is also the name of the model that node "
                    f"{other.id!r} uses: rename the node"
                )
            if placed[a.id] != placed[b.id]:
                raise ValueError(
                    f"node {b.id!r}: model {key!r} would lie on {placed[b.id]}, but node {a.id!r} "
                    f"has it on {placed[a.id]}: give {key!r} a layout of its own"
                )
            if "MODEL_TRAIN" in (a.type, b.type) and not _ordered(a, b, ancestors):
                raise ValueError(
                    f"node {b.id!r}: uses model {key!r} as node {a.id!r} does, one of them trains "
                    f"it, and no dep says which comes first: add a dep between them"
                )


# -- fields -----------------------------------------------------------------------------------


def _check_writers(order: list[Node], ancestors: Mapping[str, set[str]]) -> None:
    """Whoever reads or writes a field is ordered against all others that write it."""
    for writer in order:
        for field in writer.writes.values():
            for node in order:
                does = "writes" if field in node.writes.values() else "reads"
                if field not in (*node.writes.values(), *node.reads.values()):
                    continue
                if _ordered(node, writer, ancestors):
                    continue
                raise ValueError(
                    f"node {node.id!r}: {does} {field!r}, which node {writer.id!r} writes, and no "
                    f"dep says which comes first: add {writer.id!r} to the deps of {node.id!r}, or "
                    "rename one of the fields"
                )


def _source_of(
    node: Node,
    field: str,
    order: list[Node],
    ancestors: Mapping[str, set[str]],
    given_fields: Collection[str],
) -> str | None:
    """The last node upstream that writes the field; None if the loader gives it."""
    upstream = [other for other in order if other.id in ancestors[node.id]]
    writers = [other for other in upstream if field in other.writes.values()]
    if not writers and field in given_fields:
        return None
    if not writers:
        later = [other.id for other in order if field in other.writes.values()]
        if later:
            fix = f"it is written only later, by {later[0]!r}"
        else:
            written = {name for other in upstream for name in other.writes.values()}
            fix = hint(field, written.union(given_fields))
        raise ValueError(
            f"node {node.id!r}: reads {field!r}, which neither the loader nor a node upstream "
            f"writes ({fix})"
        )
    writer = writers[-1]
    if not node.condition.implies(writer.condition):
        raise ValueError(
            f"node {node.id!r}: reads {field!r} also in steps in which node {writer.id!r} does not "
            f"run to write it ({writer.condition}): give both the same 'when'"
        )
    return writer.id


def _last_uses(
    order: list[Node], edges: list[Edge], given_fields: Collection[str]
) -> dict[str, tuple[tuple[str | None, str], ...]]:
    """Per node, the values nobody needs after it. What nobody reads goes where it is written."""
    last: dict[tuple[str | None, str], str] = {(None, f): order[0].id for f in given_fields}
    last |= {(node.id, field): node.id for node in order for field in node.writes.values()}
    last |= {(edge.source, edge.field): edge.target for edge in edges}  # edges are in plan order
    frees: dict[str, list[tuple[str | None, str]]] = {node.id: [] for node in order}
    for value in sorted(last, key=lambda value: (value[0] or "", value[1])):
        frees[last[value]].append(value)
    return {name: tuple(values) for name, values in frees.items()}


# -- segments ---------------------------------------------------------------------------------


def _segments(tasks: Iterable[Task]) -> tuple[tuple[Task, ...], ...]:
    """Runs of adjacent device tasks that can be traced into one program.

    A segment ends where the layout or the steps in which a node runs change, where the scope
    widens, and where a field from the host enters that no task before has brought to these
    devices: a program starts when all that it reads is there.
    """
    segments: list[list[Task]] = []
    entered: set[tuple[str | None, str, Layout]] = set()
    previous = None
    for task in tasks:
        packed = {(e.source, e.field, task.layout) for e in task.edges_in if e.move == "pack"}
        if task.layout.kind == "mesh":
            if previous is None or not _continues(previous, task) or packed - entered:
                segments.append([])
            segments[-1].append(task)
        entered |= packed
        previous = task if task.layout.kind == "mesh" else None
    return tuple(tuple(segment) for segment in segments)


def _continues(previous: Task, task: Task) -> bool:
    return (
        previous.layout == task.layout
        and previous.node.condition == task.node.condition
        and SCOPES.index(task.node.scope) <= SCOPES.index(previous.node.scope)
    )


# -- text -------------------------------------------------------------------------------------


def _describe_move(edge: Edge) -> str:
    if edge.move == "stay":
        return f"stay on {edge.source_layout}"
    return f"{edge.move}: {edge.source_layout} -> {edge.target_layout}"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
