"""Graphs by their name, and from YAML files; the built-in ones are the files of configs/dags.

    name: grpo
    nodes:
    - {id: rollout, role: ROLLOUT, type: MODEL_INFERENCE, reads: [prompt], writes: [...]}

A value `${section.key}` is replaced by that value of the run's config. `base: grpo` starts from
another graph, a built-in one by its name or a file: nodes of the same id are replaced, others
added; settings are merged; a region replaces the base's. A function in a file is searched for
beside the graph's file first. docs/dag.md describes the language.
"""

import contextlib
import dataclasses
import inspect
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from distflow_jax.dag.graph import Graph, Node, Region, check_settings
from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.json_text import read_text
from distflow_jax.parsing.one_line import one_line, shown
from distflow_jax.parsing.paths import named_path, names_file
from distflow_jax.parsing.yaml_text import MOST_BYTES, BoundedLoader, load_yaml
from distflow_jax.user_functions import load_function, shipped_folder

MOST_BASES = 16  # of a graph: the base's base is the second
BUILT_IN = shipped_folder() / "dags"
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_.]*)\}")


@dataclasses.dataclass(frozen=True)
class _GraphFile:
    """The YAML of a graph, or of one of its bases."""

    where: str  # that errors name
    folder: pathlib.Path  # in which its relative paths begin
    tree: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class OpenedGraph:
    """A graph that was found and read. Its values may still be references to the config."""

    settings: Mapping[str, Any]  # config values that belong to the algorithm, see Graph
    files: Sequence[_GraphFile] = ()  # its own, then its base's, and those of the base of that
    made: Graph | None = None  # by a function, in the place of files

    def graph_with(self, config: Any) -> Graph:
        """The graph, whose references take their values from `config`. Raises ValueError."""
        return _graph_of(self.files, config) if self.made is None else self.made


def open_yaml(text_or_path: str | pathlib.Path, config: Any = None) -> OpenedGraph:
    """Reads the YAML, and that of its bases. References in `base` and in `settings` take their
    values from `config`; those in nodes and regions wait for `graph_with`.

    Raises FileNotFoundError if there is no such file, ValueError on anything else, as `graph_with`
    does.
    """
    files: list[_GraphFile] = []
    paths: list[pathlib.Path] = []
    settings: dict[str, Any] = {}
    wanted: str | pathlib.Path | None = text_or_path
    with contextlib.ExitStack() as errors:
        while wanted is not None:
            if isinstance(wanted, pathlib.Path) or "\n" not in wanted:
                path = named_path("graph file", wanted)
                if (file := path.resolve()) in paths or len(paths) > MOST_BASES:
                    why = "again" if file in paths else f"after {MOST_BASES} other bases"
                    raise ValueError(f"base leads to {path} {why}: name the graph to start from")
                paths.append(file)
                text = read_text(path, MOST_BYTES, "graph file")
                where, folder = str(path), path.parent
            else:
                text, where, folder = wanted, "graph", pathlib.Path()
            errors.enter_context(_errors_of(where))
            tree = load_yaml(text, _Loader)
            if not isinstance(tree, Mapping):
                raise ValueError(f"a graph is a map with 'name' and 'nodes', got {shown(tree)}")
            files.append(_GraphFile(where, folder, tree))
            own = _substituted(tree.get("settings", {}), config)
            check_settings(tree.get("name"), own)
            settings = {**own, **settings}
            base = _substituted(tree.get("base"), config)
            wanted = None if base is None else _base_file(base, folder)
    return OpenedGraph(settings, files)


def _graph_of(files: Sequence[_GraphFile], config: Any) -> Graph:
    """The graph of a file with its bases, with the config's values."""
    (own, *bases) = files
    with _errors_of(own.where):
        whole = _with_files(_substituted(own.tree, config), own.folder)
        if not bases:
            return _graph_from_tree(whole)
        del whole["base"]
        changes = _graph_from_tree({"nodes": [], **whole}, whole=False)
        return _on_top(_graph_of(bases, config), changes)


@contextlib.contextmanager
def _errors_of(where: str) -> Iterator[None]:
    """Puts the file, and the line of a YAML error, before an error's message."""
    try:
        yield
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{where}{line}: {one_line(str(problem))}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {one_line(str(error))}") from error


def _with_files(tree: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """The tree with whole paths for functions in files beside the graph's file."""
    nodes = tree.get("nodes", [])
    if not isinstance(nodes, list):
        return dict(tree)
    found = []
    for node in nodes:
        fn = node.get("fn") if isinstance(node, Mapping) else None
        if isinstance(fn, str) and names_file(folder / fn.rpartition(":")[0]):
            node = {**node, "fn": str(folder / fn)}
        found.append(node)
    return {**tree, "nodes": found} if "nodes" in tree else dict(tree)


def _base_file(base: Any, folder: pathlib.Path) -> pathlib.Path:
    if not isinstance(base, str):
        raise ValueError(f"base must be the name of a graph or a file, got {shown(base)}")
    if pathlib.Path(base).suffix in (".yaml", ".yml"):
        return named_path("base", base, folder)
    path = BUILT_IN / f"{base}.yaml"
    if not names_file(path):
        known = [p.stem for p in BUILT_IN.glob("*.yaml")]
        raise ValueError(
            f"base: there is no built-in graph {shown(base)} ({hint(base, known)}); or give a "
            ".yaml file"
        )
    return path


def _on_top(base: Graph, parts: dict[str, Any]) -> Graph:
    """The base graph with another file's nodes, settings and regions on top."""
    new = {node.id: node for node in parts["nodes"]}
    kept = [new.pop(node.id, node) for node in base.nodes]
    return Graph(
        name=parts["name"],
        nodes=[*kept, *new.values()],
        regions=parts["regions"] or base.regions,
        data=parts.get("data", base.data),
        settings={**base.settings, **parts.get("settings", {})},
    )


def _substituted(value: Any, config: Any) -> Any:
    """The tree with the config's values in place of references to them."""
    if isinstance(value, Mapping):
        return {key: _substituted(item, config) for key, item in value.items()}
    if isinstance(value, list):
        return [_substituted(item, config) for item in value]
    if not isinstance(value, str):
        return value
    if not (found := _REFERENCE.fullmatch(value)):
        if "." in value and (part := _REFERENCE.search(value)) and "." in part[1]:
            raise ValueError(f"{shown(value)}: {part[0]} stands for a value alone, not within text")
        return value
    for key in found[1].split("."):
        if config is None:
            raise ValueError(f"{value}: no config was given that has this value")
        names = [field.name for field in dataclasses.fields(config)]
        if key not in names:
            raise ValueError(f"{value}: the config has no {key!r} there ({hint(key, names)})")
        config = getattr(config, key)
    if dataclasses.is_dataclass(config):
        names = ", ".join(field.name for field in dataclasses.fields(config))
        raise ValueError(f"{value}: is a section of the config; name a value in it: {names}")
    return config


def _graph_from_tree(tree: Mapping[str, Any], whole: bool = True) -> Any:
    """A graph; with `whole` false its arguments, which a base completes."""
    _check_keys("graph", tree, [field.name for field in dataclasses.fields(Graph)], 2)
    for key in ("nodes", "regions"):
        if not isinstance(tree.get(key, []), list):
            raise ValueError(f"graph: {key} must be a list, got {tree[key]!r}")
    keys = [field.name for field in dataclasses.fields(Node)]
    for place, entry in enumerate(tree["nodes"], 1):
        if not isinstance(entry, Mapping):
            raise ValueError(f"node number {place} must be a map, got {entry!r}")
        name = repr(entry["id"]) if "id" in entry else f"number {place}"
        _check_keys(f"node {name}", entry, keys, 3)
    keys = [field.name for field in dataclasses.fields(Region)]
    for place, entry in enumerate(tree.get("regions", []), 1):
        if not isinstance(entry, Mapping):
            raise ValueError(f"region number {place} must be a map, got {entry!r}")
        _check_keys(f"region number {place}", entry, keys, 2)
    tree = dict(tree)
    tree["nodes"] = [Node(**entry) for entry in tree["nodes"]]
    tree["regions"] = [Region(**entry) for entry in tree.get("regions", [])]
    return Graph(**tree) if whole else tree


def _check_keys(where: str, entry: Mapping, known: list[str], num_required: int) -> None:
    for key in entry:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r} ({hint(key, known)})")
    for key in known[:num_required]:
        if key not in entry:
            raise ValueError(f"{where}: {key!r} is missing")


class _Loader(BoundedLoader):
    """Safe YAML loader that raises on a repeated key instead of overwriting its value."""

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


# YAML 1.1 parses 1e-6 as a string; here it is a float, as in a learning rate
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def built_in() -> dict[str, pathlib.Path]:
    """Name -> file of the graphs that come with the project."""
    return {path.stem: path for path in sorted(BUILT_IN.glob("*.yaml"))}


def load_graph(name_or_path: str, config: Any = None) -> Graph:
    """The graph of that name: a built-in one, a .yaml file, "module:function", "file.py:function".

    A file's `${section.key}` take their values from `config`; a function that has a parameter
    `config` is handed it. Raises ValueError or FileNotFoundError with what to write instead.
    """
    return open_graph(name_or_path, config).graph_with(config)


def open_graph(name_or_path: str, config: Any = None) -> OpenedGraph:
    """The graph of that name, read once: its settings, and the graph once these are known.

    A function is called here, with `config` before the settings. Raises as `load_graph` does.
    """
    known = built_in()
    place, _, function = name_or_path.rpartition(":")
    if pathlib.Path(name_or_path).suffix in (".yaml", ".yml") or name_or_path in known:
        return open_yaml(known.get(name_or_path) or named_path("dag", name_or_path), config)
    if not place or not function:
        raise ValueError(
            f"dag: unknown graph {name_or_path!r} ({hint(name_or_path, known)}); or give a "
            ".yaml file, module:function, or file.py:function"
        )
    make = load_function(name_or_path, "graph")
    takes_config = "config" in inspect.signature(make).parameters
    graph = make(config=config) if takes_config else make()
    if not isinstance(graph, Graph):
        raise ValueError(f"graph {name_or_path!r} must return a Graph, got {type(graph).__name__}")
    return OpenedGraph(graph.settings, made=graph)
