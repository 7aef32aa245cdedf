"""The DAG as data: nodes, graphs, their YAML form, and the checks that need nothing but the graph.

A node is one thing that happens to a batch. Its `deps` say after what; its `reads` and `writes` say
which fields go in and come out. What it does is a stage, which lives elsewhere.
"""

import dataclasses
import difflib
import json
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import yaml

ROLES = ("ACTOR", "CRITIC", "REFERENCE", "REWARD", "ROLLOUT")
TYPES = ("MODEL_INFERENCE", "MODEL_TRAIN", "COMPUTE")
SCOPES = ("sample", "group", "batch")  # narrow to wide: what a node needs before it can start

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*")


def hint(name: Any, choices: Collection[str]) -> str:
    """What to write instead of an unknown name: the nearest choice, and all of them if few."""
    choices = sorted(choices)
    known = ", ".join(choices) or "none"
    near = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    if not near:
        return f"known: {known}"
    if len(choices) > 8:
        return f"did you mean {near[0]!r}?"
    return f"did you mean {near[0]!r}? known: {known}"


@dataclasses.dataclass(frozen=True)
class When:
    """In which steps a node runs: every `every`-th one after the first `after`. Steps count from 1.

    When(every=1, after=20) runs in steps 21, 22, ...; When(every=5) in steps 5, 10, ...
    """

    every: int = 1
    after: int = 0

    def __post_init__(self):
        for key, least in (("every", 1), ("after", 0)):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"when.{key} must be an integer of at least {least}: {value!r}")

    def active(self, step: int) -> bool:
        """Whether the node runs in this step."""
        return step > self.after and (step - self.after) % self.every == 0

    def implies(self, other: "When") -> bool:
        """Whether every step that runs this also runs `other`."""
        first = self.after + self.every  # the first step that runs this
        return self.every % other.every == 0 and other.active(first)


ALWAYS = When()


@dataclasses.dataclass(frozen=True)
class Node:
    """One node of the DAG.

    `reads` and `writes` are given as a list of fields, or as a map {name inside the stage: field}
    so that two nodes with one stage can use different fields; they are kept as maps, in the order
    given. `deps` are kept sorted. `model` names an instance where a role occurs more than once.
    `fn` ("module:function") replaces the stage that role and type would give. `options` are plain
    JSON values, handed to the stage.
    """

    id: str
    role: str
    type: str
    deps: Iterable[str] = ()
    reads: Mapping[str, str] | Iterable[str] = ()
    writes: Mapping[str, str] | Iterable[str] = ()
    model: str | None = None
    scope: str = "sample"
    when: When | Mapping[str, int] | None = None
    fn: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.id, str) or not _NAME.fullmatch(self.id):
            raise ValueError(
                f"node id {self.id!r} must be a string of letters, digits, '_' and '-' that "
                "starts with a letter"
            )
        for key, choices in (("role", ROLES), ("type", TYPES), ("scope", SCOPES)):
            if getattr(self, key) not in choices:
                given = getattr(self, key)
                raise self._error(f"unknown {key} {given!r} ({hint(given, choices)})")
        if self.model is not None:
            self._check_name("model", self.model)
        if self.fn is not None and not (isinstance(self.fn, str) and ":" in self.fn[1:-1]):
            raise self._error(f"fn must be 'module:function', got {self.fn!r}")
        object.__setattr__(self, "deps", tuple(sorted(self._names("deps", self.deps))))
        object.__setattr__(self, "reads", self._fields("reads", self.reads))
        object.__setattr__(self, "writes", self._fields("writes", self.writes))
        if len(set(self.writes.values())) < len(self.writes):
            raise self._error(f"writes one field under two names: {self.writes}")
        object.__setattr__(self, "when", self._when())
        object.__setattr__(self, "options", self._plain_options())

    @property
    def condition(self) -> When:
        """`when`, with its default: always."""
        return self.when or ALWAYS

    def _error(self, message: str) -> ValueError:
        return ValueError(f"node {self.id!r}: {message}")

    def _check_name(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self._error(f"{key} must hold names (letters, digits, '_', '-'), got {value!r}")
        return value

    def _names(self, key: str, value: Any) -> list[str]:
        if isinstance(value, str) or not isinstance(value, Iterable):
            example = f"[{value}]" if isinstance(value, str) else "[]"
            raise self._error(f"{key} must be a list of names, got {value!r}: write {example}")
        names = [self._check_name(key, name) for name in value]
        for name in names:
            if names.count(name) > 1:
                raise self._error(f"{key} names {name!r} twice")
        return names

    def _fields(self, key: str, value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping):
            return {name: name for name in self._names(key, value)}
        return {self._check_name(key, k): self._check_name(key, v) for k, v in value.items()}

    def _when(self) -> When | None:
        if self.when is None or isinstance(self.when, When):
            return self.when
        if not isinstance(self.when, Mapping):
            raise self._error(f"when must be a map {{every, after}}, got {self.when!r}")
        for key in self.when:
            if key not in ("every", "after"):
                raise self._error(f"unknown key {key!r} in when ({hint(key, ('every', 'after'))})")
        try:
            return When(**self.when)
        except ValueError as error:
            raise self._error(str(error)) from error

    def _plain_options(self) -> dict[str, Any]:
        if not isinstance(self.options, Mapping):
            raise self._error(f"options must be a map, got {self.options!r}")
        try:  # through JSON, so that a tuple and the list that YAML would give are one thing
            plain = json.loads(json.dumps(dict(self.options), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise self._error(f"options must be plain JSON values: {error}") from error
        if _string_keys(self.options):
            return plain
        raise self._error(f"options must have strings as keys: {self.options!r}")


def _string_keys(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _string_keys(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(_string_keys(v) for v in value)
    return True


@dataclasses.dataclass(frozen=True)
class Graph:
    """Nodes that form a DAG: ids are unique, deps exist, and there is no cycle."""

    name: str
    nodes: Iterable[Node]

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"graph name must be a non-empty string, got {self.name!r}")
        object.__setattr__(self, "nodes", tuple(self.nodes))
        if not self.nodes:
            raise ValueError(f"graph {self.name!r} has no nodes")
        ids = [node.id for node in self.nodes]
        for node in self.nodes:
            if ids.count(node.id) > 1:
                raise ValueError(f"node {node.id!r} occurs twice: give each node its own id")
            for dep in node.deps:
                if dep not in ids:
                    raise ValueError(f"node {node.id!r}: unknown dep {dep!r} ({hint(dep, ids)})")
        cycle = find_cycle({node.id: node.deps for node in self.nodes})
        if cycle:
            raise ValueError(
                f"node {cycle[0]!r} waits for itself: {' -> '.join(cycle)} "
                "(each waits for the next; remove one of these deps)"
            )

    @classmethod
    def from_yaml(cls, text_or_path: str | pathlib.Path) -> "Graph":
        """Reads a graph from YAML text, or from a file if it is given as a Path or as one line.

        Raises FileNotFoundError if there is no such file, ValueError on anything else.
        """
        if isinstance(text_or_path, pathlib.Path) or "\n" not in text_or_path:
            path = pathlib.Path(text_or_path)
            if not path.is_file():
                raise FileNotFoundError(f"graph file {str(path)!r} does not exist")
            text, where = path.read_text(encoding="utf-8"), str(path)
        else:
            text, where = text_or_path, "graph"
        try:
            return _graph_from_tree(yaml.load(text, _Loader))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}" if mark else ""
            raise ValueError(f"{where}{line}: {getattr(error, 'problem', error)}") from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def to_yaml(self) -> str:
        """The graph as YAML; keys that have their default are left out. from_yaml reads it back."""
        tree = {"name": self.name, "nodes": [_node_tree(node) for node in self.nodes]}
        return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


def find_cycle(deps: Mapping[str, Iterable[str]]) -> list[str]:
    """A path [a, b, ..., a] in which each waits for the next; [] if there is none."""
    finished: set[str] = set()
    for start in sorted(deps):
        path, pending = [start], [iter(sorted(deps[start]))]
        while pending:
            following = next(pending[-1], None)
            if following is None:
                pending.pop()
                finished.add(path.pop())
            elif following in path:
                return path[path.index(following) :] + [following]
            elif following not in finished:
                path.append(following)
                pending.append(iter(sorted(deps[following])))
    return []


def _graph_from_tree(tree: Any) -> Graph:
    if not isinstance(tree, Mapping):
        raise ValueError(f"a graph is a map with 'name' and 'nodes', got {tree!r}")
    _check_keys("graph", tree, [field.name for field in dataclasses.fields(Graph)], 2)
    if not isinstance(tree["nodes"], list):
        raise ValueError(f"graph: nodes must be a list, got {tree['nodes']!r}")
    keys = [field.name for field in dataclasses.fields(Node)]
    for place, entry in enumerate(tree["nodes"], 1):
        if not isinstance(entry, Mapping):
            raise ValueError(f"node number {place} must be a map, got {entry!r}")
        name = repr(entry["id"]) if "id" in entry else f"number {place}"
        _check_keys(f"node {name}", entry, keys, 3)
    return Graph(tree["name"], [Node(**entry) for entry in tree["nodes"]])


def _check_keys(where: str, entry: Mapping, known: list[str], num_required: int) -> None:
    for key in entry:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r} ({hint(key, known)})")
    for key in known[:num_required]:
        if key not in entry:
            raise ValueError(f"{where}: {key!r} is missing")


def _node_tree(node: Node) -> dict[str, Any]:
    defaults = Node(node.id, node.role, node.type)
    tree = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if field.name not in ("id", "role", "type") and value == getattr(defaults, field.name):
            continue
        if field.name in ("reads", "writes") and all(k == v for k, v in value.items()):
            value = list(value)
        elif field.name == "deps":
            value = list(value)
        elif field.name == "when":
            value = dataclasses.asdict(value)
        tree[field.name] = value
    return tree


class _Loader(yaml.SafeLoader):
    """Safe YAML, in which a key given twice is an error rather than a silent overwrite."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                problem = f"key {key.value!r} must be a string: quote it"
            elif key.value in seen:
                problem = f"key {key.value!r} is given twice"
            else:
                seen.add(key.value)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what _Loader reads."""


# YAML 1.1 reads 1e-6 as a string, which no one who writes a learning rate means
for _yaml_class in (_Loader, _Dumper):
    _yaml_class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )
