"""Graphs from YAML text, and as YAML text, for tests that vary or round-trip a graph."""

import dataclasses
import pathlib
import re
from typing import Any

import yaml

from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.graph_yaml import open_yaml


def read_graph(text_or_path: str | pathlib.Path, config: Any = None) -> Graph:
    """The graph of YAML text; a Path or a single line names a file; see open_yaml."""
    return open_yaml(text_or_path, config).graph_with(config)


class _Dumper(yaml.SafeDumper):
    """Quotes strings such as "1e-6", which read_graph takes for numbers."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def write_graph(graph: Graph) -> str:
    """The graph as YAML; keys that have their default are left out."""
    tree: dict[str, Any] = {"name": graph.name}
    if graph.data != "prompts":
        tree["data"] = graph.data
    if graph.settings:
        tree["settings"] = dict(graph.settings)
    tree["nodes"] = [_node_tree(node) for node in graph.nodes]
    if graph.regions:
        tree["regions"] = [
            {"nodes": list(r.nodes), "until": r.until, "max_rounds": r.max_rounds}
            for r in graph.regions
        ]
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


def _node_tree(node: Node) -> dict[str, Any]:
    defaults = Node(node.id, node.role, node.type)
    tree = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if field.name not in ("id", "role", "type") and value == getattr(defaults, field.name):
            continue
        if field.name in ("reads", "writes", "may_read") and all(k == v for k, v in value.items()):
            value = list(value)
        elif field.name in ("deps", "per_token"):
            value = list(value)
        elif field.name == "when":
            value = dataclasses.asdict(value)
        tree[field.name] = value
    return tree
