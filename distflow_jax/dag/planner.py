"""The planner: a graph and the layout of each role give the plan that every process walks.

`plan` is a pure function. Its result depends neither on the order in which nodes are listed nor on
the hash seed: each process computes the plan, and all compare digests at the start.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping

from distflow_jax.dag.graph import NO_REGION, ROLES, SCOPES, TYPES, Graph, Node
from distflow_jax.dag.plan import Plan, Task
from distflow_jax.did_you_mean import hint
from distflow_jax.layout import (
    KEEP,
    ROWS,
    ROWS_COLUMNS,
    Edge,
    Layout,
    move_between,
    overlaps,
    submesh_text,
)

HOST = Layout("host")


def plan(
    graph: Graph,
    layouts: Mapping[str, Layout],
    loader_fields: Mapping[str, Layout] | Collection[str],
    *,
    fuse: bool = True,
) -> Plan:
    """Orders the nodes of a graph and chooses the move of each field.

    Args:
      graph: the graph.
      layouts: keyed by role, by "role type" or by model instance; the instance has precedence, then
        the type (a REWARD may be a function on the host, or a model).
      loader_fields: the loader's fields, with their layouts; on the host if none are given.
      fuse: whether adjacent device nodes form one segment. Without, each is a segment of its own.

    Raises:
      ValueError: the order of two nodes, or the value of a field, is ambiguous, or a layout is
        missing or impossible. The message names the node and the change to make.
    """
    if not isinstance(loader_fields, Mapping):
        loader_fields = dict.fromkeys(loader_fields, HOST)
    graph = graph.settle()
    region = graph.regions[0] if graph.regions else NO_REGION
    placed = {node.id: _layout_of(node, layouts) for node in graph.nodes}
    inside = set(region.nodes)
    deps = _deps(graph, inside)
    depths = _depths(deps)

    def place(node: Node) -> tuple:
        return (node.id not in inside, *_place(node, depths[node.id], placed[node.id]))

    order = sorted(graph.nodes, key=place)
    ancestors = _ancestors(order, deps)
    _check_region(order[: len(inside)], placed)
    _check_submeshes(order, placed)
    _check_states(order, ancestors, placed)
    _check_rows(order, placed)
    users = _Users.of(order)
    _check_writers(users, ancestors)
    _check_keep(order, users, ancestors)

    edges_in: dict[str, list[Edge]] = {}
    edges_out = collections.defaultdict(list)
    for node in order:
        edges_in[node.id] = []
        for field in sorted(set(node.reads.values())):
            if field == ROWS:
                source = _source_of_rows(node, users, ancestors, loader_fields, placed)
            else:
                source = _source_of(node, field, users, ancestors, loader_fields)
            written = "response" if field == ROWS else field
            start = loader_fields[written] if source is None else placed[source]
            move = move_between(start, placed[node.id])
            edge = Edge(field, source, node.id, start, placed[node.id], move)
            edges_in[node.id].append(edge)
            edges_out[source].append(edge)
    frees = _last_uses(order, edges_in, loader_fields)
    tasks = tuple(
        Task(
            node=node,
            depth=depths[node.id],
            state_key=state_key(node),
            layout=placed[node.id],
            edges_in=tuple(edges_in[node.id]),
            edges_out=tuple(edges_out[node.id]),
            frees=frees[node.id],
        )
        for node in order
    )
    loader = tuple(sorted(loader_fields.items()))
    return Plan(graph.name, loader, tasks, _segments(tasks, fuse), region)


# -- order ------------------------------------------------------------------------------------


def _deps(graph: Graph, inside: set[str]) -> dict[str, set[str]]:
    """Deps of each node; nodes outside the region depend on all `inside` of it."""
    # a region decides the step's prompts: all other nodes follow it
    return {n.id: {*n.deps} if n.id in inside else {*n.deps, *inside} for n in graph.nodes}


def _depths(deps: Mapping[str, Collection[str]]) -> dict[str, int]:
    """The length of the longest chain of deps above each node. The graph has no cycle."""
    waiting = {name: len(above) for name, above in deps.items()}
    below: dict[str, list[str]] = {name: [] for name in deps}
    for name, above in deps.items():
        for dep in above:
            below[dep].append(name)
    depths = {name: 0 for name, count in waiting.items() if not count}
    ready = list(depths)
    for name in ready:
        for following in below[name]:
            depths[following] = max(depths.get(following, 0), depths[name] + 1)
            waiting[following] -= 1
            if not waiting[following]:
                ready.append(following)
    return depths


def _place(node: Node, depth: int, layout: Layout) -> tuple:
    """Sort key. Device work precedes host work, since it is dispatched asynchronously."""
    place = (
        depth,
        layout.kind == "host",
        layout.axes,
        layout.submesh or (),
        ROLES.index(node.role),
    )
    return place + (TYPES.index(node.type), node.model or "", node.id)


def _ancestors(order: Iterable[Node], deps: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    ancestors: dict[str, set[str]] = {}
    for node in order:
        above = deps[node.id]
        ancestors[node.id] = set(above).union(*(ancestors[dep] for dep in above))
    return ancestors


def _ordered(a: Node, b: Node, ancestors: Mapping[str, set[str]]) -> bool:
    return a.id in ancestors[b.id] or b.id in ancestors[a.id] or a.id == b.id


def _check_region(nodes: Iterable[Node], placed: Mapping[str, Layout]) -> None:
    for node in nodes:
        if placed[node.id].kind != "host":
            raise ValueError(
                f"node {node.id!r}: runs on {placed[node.id]}, but nodes of a region run on the "
                "host (ROLLOUT, REWARD COMPUTE), before responses are packed: take it out"
            )


# -- layouts and states -----------------------------------------------------------------------


def _check_submeshes(order: Iterable[Node], placed: Mapping[str, Layout]) -> None:
    """Raises ValueError unless two nodes on meshes have the same devices, or none in common."""
    first: dict[tuple[int, int] | None, Node] = {}  # on each submesh
    for node in order:
        layout = placed[node.id]
        if layout.kind == "host" or layout.submesh in first:
            continue
        for submesh, other in first.items():
            if overlaps(layout, placed[other.id]):
                ours, theirs = (
                    f"devices {submesh_text(p)} of every host" if p else "all devices"
                    for p in (layout.submesh, submesh)
                )
                raise ValueError(
                    f"node {node.id!r}: runs on {ours} and node {other.id!r} on {theirs}, which is "
                    "neither the same nor apart: give mesh.devices and every one of mesh.roles "
                    "submeshes that are equal or disjoint"
                )
        first[layout.submesh] = node


def _layout_of(node: Node, layouts: Mapping[str, Layout]) -> Layout:
    model = None if node.role == "ROLLOUT" else node.model  # a sampler's model is another node's
    for key in (model, f"{node.role} {node.type}", node.role):
        if key in layouts:
            return layouts[key]
    wanted = node.role if node.model is None else f"{node.role} or model {node.model}"
    raise ValueError(
        f"node {node.id!r}: no layout for {wanted} ({hint(node.role, layouts)}): "
        "give it one in the mesh section"
    )


def state_key(node: Node) -> str:
    """The key of the state that a node's stage is called with."""
    if node.role == "ROLLOUT" and node.type != "COMPUTE":
        # the sampler's state, not that of `model`, which names the policy that it samples from
        return f"rollout:{node.model}" if node.model else "rollout"
    if node.model is not None:
        return node.model
    # a COMPUTE node may have a model's name: a reward function "reward" beside a reward model
    return f"node:{node.id}" if node.type == "COMPUTE" else node.role.lower()


def _check_states(
    order: list[Node], ancestors: Mapping[str, set[str]], placed: Mapping[str, Layout]
) -> None:
    """Raises ValueError unless a state has one layout, and its training an order with its uses."""
    by_key = collections.defaultdict(list)
    for node in order:
        by_key[state_key(node)].append(node)
    for key, nodes in by_key.items():
        for i, a in enumerate(nodes):
            for b in nodes[i + 1 :]:
                if placed[a.id] != placed[b.id]:
                    raise ValueError(
                        f"node {b.id!r}: uses model {key!r} on {placed[b.id]}, but node "
                        f"{a.id!r} has it on {placed[a.id]}: give {key!r} a layout of its own"
                    )
                if "MODEL_TRAIN" in (a.type, b.type) and not _ordered(a, b, ancestors):
                    raise ValueError(
                        f"node {b.id!r}: uses model {key!r} as node {a.id!r} does, one of them "
                        f"trains it, and no dep says which comes first: add a dep between them"
                    )


# -- fields -----------------------------------------------------------------------------------


def _check_rows(order: Iterable[Node], placed: Mapping[str, Layout]) -> None:
    """On a mesh responses are the field `rows`, on the host the columns that it is packed of."""
    for node in order:
        layout, reads = placed[node.id], node.reads.values()
        columns = [field for field in (*ROWS_COLUMNS, "uid") if field in reads]
        if layout.kind == "mesh" and columns:
            raise ValueError(
                f"node {node.id!r}: reads {', '.join(columns)} on {layout}, where prompts and "
                f"responses are packed: write {ROWS} in place of that"
            )
        if layout.kind == "host" and ROWS in reads:
            raise ValueError(
                f"node {node.id!r}: reads {ROWS} on the host, where responses are columns: write "
                f"those that it needs of {', '.join(ROWS_COLUMNS)} in place of that"
            )
        if ROWS in node.writes.values():
            raise ValueError(
                f"node {node.id!r}: writes {ROWS}, which is packed of {', '.join(ROWS_COLUMNS)}: "
                "rename the field"
            )


def _check_keep(order: Iterable[Node], users: "_Users", ancestors: Mapping[str, set[str]]) -> None:
    """Raises ValueError unless a node that drops responses is ordered with all others."""
    for writer in users.writers.get(KEEP, ()):
        for node in order:
            if not _ordered(node, writer, ancestors):
                raise ValueError(
                    f"node {node.id!r}: node {writer.id!r} writes {KEEP!r}, which drops responses, "
                    "and no dep says which of the two comes first: add "
                    f"{writer.id!r} to the deps of {node.id!r}"
                )


@dataclasses.dataclass(frozen=True)
class _Users:
    """The writers and readers of each field, in plan order."""

    writers: Mapping[str, list[Node]]
    readers: Mapping[str, list[Node]]

    @classmethod
    def of(cls, order: Iterable[Node]) -> "_Users":
        users = cls(collections.defaultdict(list), collections.defaultdict(list))
        for node in order:
            for field in node.writes.values():
                users.writers[field].append(node)
            for field in dict.fromkeys(node.reads.values()):
                for column in ROWS_COLUMNS if field == ROWS else (field,):
                    users.readers[column].append(node)
        return users


def _check_writers(users: _Users, ancestors: Mapping[str, set[str]]) -> None:
    """Raises ValueError unless each writer of a field is ordered with its readers and writers."""
    for field, writers in users.writers.items():
        for writer in writers:
            for does, nodes in (("writes", writers), ("reads", users.readers[field])):
                for node in nodes:
                    if _ordered(node, writer, ancestors):
                        continue
                    raise ValueError(
                        f"node {node.id!r}: {does} {field!r}, which node {writer.id!r} writes, and "
                        f"no dep says which comes first: add {writer.id!r} to the deps of "
                        f"{node.id!r}, or rename one of the fields"
                    )


def _source_of(
    node: Node,
    field: str,
    users: _Users,
    ancestors: Mapping[str, set[str]],
    loader_fields: Collection[str],
) -> str | None:
    """The last node upstream that writes the field; None for the loader."""
    above = ancestors[node.id]
    writers = [other for other in users.writers.get(field, ()) if other.id in above]
    if not writers and field in loader_fields:
        return None
    if not writers:
        later = users.writers.get(field)
        if later:
            fix = f"it is written only later, by {later[0].id!r}"
        else:
            written = {f for f, by in users.writers.items() if any(n.id in above for n in by)}
            fix = hint(field, written.union(loader_fields))
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


def _source_of_rows(
    node: Node,
    users: _Users,
    ancestors: Mapping[str, set[str]],
    loader_fields: Collection[str],
    placed: Mapping[str, Layout],
) -> str | None:
    """The last node upstream that writes `response`; None if the loader gives it.

    Raises ValueError unless there are all the columns that rows are packed of, on the host.
    """
    sources = {}
    for column in ROWS_COLUMNS:
        source = sources[column] = _source_of(node, column, users, ancestors, loader_fields)
        if source is not None and placed[source].kind == "mesh":
            raise ValueError(
                f"node {source!r}: writes {column!r} on {placed[source]}, and {ROWS} are packed of "
                f"columns of the host, which node {node.id!r} reads: rename the field"
            )
    return sources["response"]


def _last_uses(
    order: list[Node], edges_in: Mapping[str, list[Edge]], loader_fields: Collection[str]
) -> dict[str, tuple[tuple[str | None, str], ...]]:
    """Per node, the values whose last use it is; unread values are freed by their writer."""
    last: dict[tuple[str | None, str], str] = {(None, f): order[0].id for f in loader_fields}
    last |= {(node.id, field): node.id for node in order for field in node.writes.values()}
    for node in order:
        last |= {(edge.source, edge.field): node.id for edge in edges_in[node.id]}
    frees: dict[str, list[tuple[str | None, str]]] = {node.id: [] for node in order}
    for value in sorted(last, key=lambda value: (value[0] or "", value[1])):
        frees[last[value]].append(value)
    return {name: tuple(values) for name, values in frees.items()}


# -- segments ---------------------------------------------------------------------------------


def _segments(tasks: Iterable[Task], fuse: bool) -> tuple[tuple[Task, ...], ...]:
    """Runs of adjacent device tasks that are traced into one program.

    A segment ends where the layout or the condition changes, and where the scope widens. A node
    that trains is a segment of its own: it replaces its model's state, and two of them in one
    program would need the memory of both.
    """
    segments: list[list[Task]] = []
    previous = None
    for task in tasks:
        if task.layout.kind == "mesh":
            if not fuse or previous is None or not _continues(previous, task):
                segments.append([])
            segments[-1].append(task)
        previous = task if task.layout.kind == "mesh" else None
    return tuple(tuple(segment) for segment in segments)


def _continues(previous: Task, task: Task) -> bool:
    return (
        previous.layout == task.layout
        and previous.node.condition == task.node.condition
        and "MODEL_TRAIN" not in (previous.node.type, task.node.type)
        and SCOPES.index(task.node.scope) <= SCOPES.index(previous.node.scope)
    )
