"""The DAG as data: nodes, regions, graphs, and the checks that need nothing but the graph.

A node is one thing that happens to a batch. Its `deps` say after what; its `reads` and `writes` say
which fields go in and come out. What it does is a stage, which lives elsewhere. docs/dag.md is the
language's reference.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from distflow_jax.did_you_mean import hint
from distflow_jax.layout import ROWS, ROWS_COLUMNS
from distflow_jax.parsing.checked_fields import COUNT, SIZE, check_fields
from distflow_jax.parsing.setting_checks import Section, setting

ROLES = ("ACTOR", "CRITIC", "REFERENCE", "REWARD", "ROLLOUT")
TYPES = ("MODEL_INFERENCE", "MODEL_TRAIN", "COMPUTE")
SCOPES = ("sample", "group", "batch")  # narrow to wide: what a node needs before it can start
# what the loader gives for each row of the data set, and how many responses that is
DATA = {
    "prompts": ("uid", "prompt"),
    "demonstrations": ("uid", "prompt", "response", "response_mask", "finished"),
    "preferences": ("uid", "prompt", "response", "response_mask", "finished"),
    "unpaired": ("uid", "prompt", "response", "response_mask", "finished", "label"),
}

_FUNCTION = re.compile(r"[A-Za-z_]\w*|[^:]+:[^:]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*")


@dataclasses.dataclass(frozen=True)
class When(Section, name="when"):
    """In which steps a node runs: every `every`-th one after the first `after`. Steps count from 1.

    When(every=1, after=20) runs in steps 21, 22, ...; When(every=5) in steps 5, 10, ...
    """

    every: int = setting(1, COUNT)
    after: int = setting(0, SIZE)

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
    given. `may_read` lists, in the same way, what is read only where the run needs it (see
    Graph.settle). `deps` are kept sorted. `model` names an instance where a role occurs more than
    once. `fn` ("module:function", or the name of a built-in stage) replaces the stage that role and
    type would give. `options` are plain JSON values, handed to the stage. `per_token` names those
    of its `writes` (the names inside) in which a function on the host gives one number per response
    token; the others hold one per response.
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
    may_read: Mapping[str, str] | Iterable[str] = ()
    per_token: Iterable[str] = ()

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
        if self.fn is not None and not (isinstance(self.fn, str) and _FUNCTION.fullmatch(self.fn)):
            raise self._error(
                f"fn must be 'module:function', 'file.py:function' or the name of a built-in "
                f"stage, got {self.fn!r}"
            )
        object.__setattr__(self, "deps", tuple(sorted(self._names("deps", self.deps))))
        object.__setattr__(self, "reads", self._fields("reads", self.reads))
        object.__setattr__(self, "writes", self._fields("writes", self.writes))
        object.__setattr__(self, "may_read", self._fields("may_read", self.may_read))
        for name in self.may_read:
            if name in self.reads:
                raise self._error(f"reads {name!r}, and may read it: name it once")
        object.__setattr__(self, "per_token", tuple(self._names("per_token", self.per_token)))
        for name in self.per_token:
            if name not in self.writes:
                raise self._error(
                    f"per_token names {name!r}, which it does not write ({hint(name, self.writes)})"
                )
        if len(set(self.writes.values())) < len(self.writes):
            raise self._error(f"writes one field under two names: {self.writes}")
        object.__setattr__(self, "when", self._when())
        object.__setattr__(self, "options", self._plain_options())

    @property
    def condition(self) -> When:
        """`when`, with its default: always."""
        return self.when or ALWAYS

    def settle(self, wanted: Collection[str] | None) -> "Node":
        """The node that reads what it may read, of that only what is `wanted` (names inside).

        None takes all.
        """
        if not self.may_read:
            return self
        taken = {k: v for k, v in self.may_read.items() if wanted is None or k in wanted}
        return dataclasses.replace(self, reads={**self.reads, **taken}, may_read=())

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

    @property
    def is_users(self) -> bool:
        """Whether it names a function of the user, "module:function" or "file.py:function"."""
        return self.fn is not None and ":" in self.fn


def _string_keys(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _string_keys(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(_string_keys(v) for v in value)
    return True


@dataclasses.dataclass(frozen=True)
class Region:
    """Nodes that run again, with the next prompts, until enough groups are worth training on.

    After each round `until` ("informative", or "module:function") says of every response of the
    round whether its group stays; of the groups that stay over all rounds and processes, the first
    `data.prompts_per_step` by prompt index make up the step. After `max_rounds` rounds the step
    goes on with those that there are.
    """

    nodes: Iterable[str]
    until: str
    max_rounds: int = 10

    def __post_init__(self):
        nodes = self.nodes
        if isinstance(nodes, str) or not isinstance(nodes, Iterable):
            raise ValueError(f"region: nodes must be a list of node ids, got {nodes!r}")
        object.__setattr__(self, "nodes", tuple(sorted(nodes)))
        check_fields(vars(self), {"max_rounds": COUNT}, f"region {list(self.nodes)}")


NO_REGION = Region((), "", 1)


@dataclasses.dataclass(frozen=True)
class Graph:
    """Nodes that form a DAG: ids are unique, deps exist, and there is no cycle.

    `data` says what a row of the data set is (DATA): a prompt, or one with its answer, with a
    better and a worse one, or with a labelled one. `settings` are config values of the algorithm,
    e.g. {"algorithm.clip_high": 0.28}: defaults, which config and command line override. `regions`
    has one entry at most.
    """

    name: str
    nodes: Iterable[Node]
    regions: Iterable[Region] = ()
    data: str = "prompts"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"graph name must be a non-empty string, got {self.name!r}")
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "regions", tuple(self.regions))
        if not self.nodes:
            raise ValueError(f"graph {self.name!r} has no nodes")
        if self.data not in DATA:
            raise ValueError(
                f"graph {self.name!r}: unknown data {self.data!r} ({hint(self.data, DATA)})"
            )
        check_settings(self.name, self.settings)
        self._check_nodes()
        self._check_regions()

    def _check_nodes(self) -> None:
        ids: set[str] = set()
        for node in self.nodes:
            if node.id in ids:
                raise ValueError(f"node {node.id!r} occurs twice: give each node its own id")
            ids.add(node.id)
        for node in self.nodes:
            for dep in node.deps:
                if dep not in ids:
                    raise ValueError(f"node {node.id!r}: unknown dep {dep!r} ({hint(dep, ids)})")
        cycle = find_cycle({node.id: node.deps for node in self.nodes})
        if cycle:
            raise ValueError(
                f"node {cycle[0]!r} waits for itself: {' -> '.join(cycle)} "
                "(each waits for the next; remove one of these deps)"
            )

    def _check_regions(self) -> None:
        if len(self.regions) > 1:
            raise ValueError(
                f"graph {self.name!r} has {len(self.regions)} regions: a step's prompts are drawn "
                "by one; put their nodes into one region"
            )
        by_id = {node.id: node for node in self.nodes}
        for region in self.regions:
            if not region.nodes:
                raise ValueError("region: nodes must name at least one node")
            if not isinstance(region.until, str) or not region.until:
                raise ValueError(
                    f"region {list(region.nodes)}: until must be a name or 'module:function', got "
                    f"{region.until!r}"
                )
            for name in region.nodes:
                if name not in by_id:
                    raise ValueError(f"region: unknown node {name!r} ({hint(name, by_id)})")
                if by_id[name].when is not None:
                    raise ValueError(f"node {name!r}: has a 'when' inside a region: take one out")
                outside = sorted(set(by_id[name].deps) - set(region.nodes))
                if outside:
                    raise ValueError(
                        f"node {name!r}: is in a region and waits for {outside[0]!r} outside of "
                        "it, which runs once while the region runs again with other prompts: add "
                        f"{outside[0]!r} to the region, or take {name!r} out of it"
                    )

    def settle(self, wanted: Mapping[str, Collection[str]] | None = None) -> "Graph":
        """The graph without the optional reads that a run does not want, and what fed them alone.

        `wanted`: node id -> names inside that are wanted, for the nodes that have optional reads;
        None takes them all. A node goes if it trains nothing, and somebody read it only as an
        option that was not taken. Other nodes then no longer wait for it, but for what it waited
        for.
        """
        settled = [
            node.settle(None if wanted is None else wanted.get(node.id, ())) for node in self.nodes
        ]
        unread = {field for node in self.nodes for field in node.may_read.values()}
        gone: dict[str, tuple[str, ...]] = {}
        while True:
            kept = [node for node in settled if node.id not in gone]
            read = {field for node in kept for field in node.reads.values()}
            read.update(ROWS_COLUMNS if ROWS in read else ())
            dropped = [
                node
                for node in kept
                if node.type != "MODEL_TRAIN"
                and node.writes
                and not read & set(node.writes.values())
                and unread & set(node.writes.values())
            ]
            if not dropped:
                break
            gone |= {node.id: node.deps for node in dropped}
        if not gone and settled == list(self.nodes):
            return self
        nodes = [_without(node, gone) for node in settled if node.id not in gone]
        regions = [
            dataclasses.replace(region, nodes=[n for n in region.nodes if n not in gone])
            for region in self.regions
        ]
        return dataclasses.replace(self, nodes=nodes, regions=regions)


def check_settings(name: Any, settings: Any) -> None:
    """Raises ValueError unless the settings of the graph `name` are a map with strings as keys."""
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"graph {name!r}: settings must be a map of config keys, got {settings!r}")


def _without(node: Node, gone: Mapping[str, Iterable[str]]) -> Node:
    """The node waiting, in place of nodes that are gone, for what these waited for."""
    deps, pending = set(), list(node.deps)
    while pending:
        dep = pending.pop()
        if dep in gone:
            pending.extend(gone[dep])
        else:
            deps.add(dep)
    return dataclasses.replace(node, deps=deps) if deps != set(node.deps) else node


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
