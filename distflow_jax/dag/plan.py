"""The plan that every process walks: ordered tasks, units, and their text."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from distflow_jax.dag.graph import NO_REGION, Node, Region, When
from distflow_jax.layout import Edge, Layout
from distflow_jax.parsing.json_text import json_table
from distflow_jax.programs.text_table import fill_lines, text_table


@dataclasses.dataclass(frozen=True)
class Task:
    """A node in the order of a plan.

    `edges_in` has one edge per field that the node reads, `edges_out` one per reader of a field
    that it writes. `frees` lists the (source, field) values whose last reader this task is; a
    source of None is the loader. `state_key` names the state that the stage is called with: a
    model's, or the node's own.
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
            "layout": self.layout.to_tree(),
            "edges_in": [edge.to_tree() for edge in self.edges_in],
            "edges_out": [edge.to_tree() for edge in self.edges_out],
            "frees": self.frees,
        }


@dataclasses.dataclass(frozen=True)
class Unit:
    """Tasks that run as one: a task on the host, or a segment of tasks on a mesh.

    `inputs` has one edge for each value from outside the unit. `outputs` are the (source, field)
    values with a reader outside; values read only inside the unit never leave it.
    """

    tasks: tuple[Task, ...]
    inputs: tuple[Edge, ...]
    outputs: tuple[tuple[str, str], ...]
    frees: tuple[tuple[str | None, str], ...]

    @classmethod
    def of(cls, tasks: tuple[Task, ...]) -> "Unit":
        """The unit of these tasks, which are adjacent in a plan."""
        inside = {task.node.id for task in tasks}
        edges = [edge for task in tasks for edge in task.edges_in if edge.source not in inside]
        inputs = {(edge.source, edge.field): edge for edge in reversed(edges)}
        outgoing = {
            (e.source, e.field) for t in tasks for e in t.edges_out if e.target not in inside
        }
        written = [(t.node.id, field) for t in tasks for field in t.node.writes.values()]
        outputs = tuple(value for value in written if value in outgoing or len(tasks) == 1)
        frees = [v for t in tasks for v in t.frees if v[0] not in inside or v in outputs]
        return cls(tasks, tuple(reversed(inputs.values())), outputs, tuple(frees))

    @property
    def name(self) -> str:
        """The ids of its nodes, in order: "values.reference"."""
        return ".".join(task.node.id for task in self.tasks)

    @property
    def is_users(self) -> bool:
        """Whether a node of it has a function of the user."""
        return any(task.node.is_users for task in self.tasks)

    @property
    def layout(self) -> Layout:
        """The layout of all its tasks."""
        return self.tasks[0].layout

    @property
    def condition(self) -> When:
        """The steps in which all its tasks run."""
        return self.tasks[0].node.condition

    @property
    def state_keys(self) -> tuple[str, ...]:
        """The keys of the states that its stages are called with."""
        return tuple(dict.fromkeys(task.state_key for task in self.tasks))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tasks in the order in which every process runs them.

    `segments` are the runs of device tasks that are one program each. `loader_fields` have the
    loader's fields with their layouts. The tasks of `region` come first.
    """

    name: str
    loader_fields: tuple[tuple[str, Layout], ...]
    tasks: tuple[Task, ...]
    segments: tuple[tuple[Task, ...], ...]
    region: Region = NO_REGION

    @functools.cached_property
    def units(self) -> tuple[Unit, ...]:
        """All units, in order."""
        starts = {segment[0].node.id: segment for segment in self.segments}
        fused = {task.node.id for segment in self.segments for task in segment}
        return tuple(
            Unit.of(starts.get(task.node.id, (task,)))
            for task in self.tasks
            if task.node.id in starts or task.node.id not in fused
        )

    def split(self) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
        """(units of the region, units after it). A region's nodes run on the host."""
        inside = len(self.region.nodes)
        return self.units[:inside], self.units[inside:]

    def to_json(self) -> str:
        """Canonical JSON: equal plans give equal text, on every process."""
        tree = {
            "name": self.name,
            "given": [[name, layout.to_tree()] for name, layout in self.loader_fields],
            "tasks": [task.to_tree() for task in self.tasks],
            "segments": [[task.node.id for task in segment] for segment in self.segments],
            "region": dataclasses.asdict(self.region) if self.region.nodes else None,
        }
        return json.dumps(tree, sort_keys=True, separators=(",", ":"))

    def table(self) -> dict[str, str]:
        """{"rollout.layout.kind": "\"host\"", ...}: all of `to_json`, by node."""
        tree = json.loads(self.to_json())
        tasks = {task["node"]["id"]: {"place": i} | task for i, task in enumerate(tree["tasks"])}
        del tree["tasks"]
        return json_table(json.dumps(tree)) | json_table(json.dumps(tasks))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of to_json(), in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def describe(self, notes: Mapping[str, Mapping[str, str]] | None = None) -> str:
        """Returns the plan as tables: nodes, their reads with moves, and segments.

        `notes`: further columns of the first table, {title: {node id: text}}.
        """
        notes = notes or {}
        nodes = [("#", "depth", "node", "role", "type", "model", "layout", "writes", *notes)]
        reads = [("node", "reads", "from", "move")]
        for place, task in enumerate(self.tasks, 1):
            node = task.node
            where = (str(place), str(task.depth), node.id, node.role, node.type, node.model or "-")
            more = [column.get(node.id, "-") for column in notes.values()]
            nodes.append((*where, str(task.layout), ", ".join(node.writes.values()) or "-", *more))
            fields: dict[tuple[str, str], list[str]] = {}  # (from, move) -> fields
            for edge in task.edges_in:
                way = (edge.source or "(loader)", _describe_move(edge))
                fields.setdefault(way, []).append(edge.field)
            reads += [(node.id, ", ".join(names), *way) for way, names in fields.items()]
        segments = " | ".join(" + ".join(t.node.id for t in part) for part in self.segments)
        loop = ""
        if inside := self.split()[0]:
            names = ", ".join(unit.name for unit in inside)
            loop = (
                f"again with the next prompts until enough groups are {self.region.until}, at most "
                f"{self.region.max_rounds} times: {names}\n"
            )
        return (
            f"plan {self.name}, digest {self.digest[:12]}\n\n{text_table(nodes)}\n\n"
            f"{text_table(reads)}\n\n"
            + fill_lines(f"{loop}device segments: {segments or 'none'}\n")
        )


def _describe_move(edge: Edge) -> str:
    if edge.move == "stay":
        return f"stay on {edge.source_layout}"
    return f"{edge.move}: {edge.source_layout} -> {edge.target_layout}"
