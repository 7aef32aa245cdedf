"""How a graph is found by its name: the built-in ones are the YAML files of configs/dags."""

import inspect
import pathlib
from typing import Any

from distflow_jax.dag.graph import Graph
from distflow_jax.dag.graph_yaml import BUILT_IN, read_graph
from distflow_jax.did_you_mean import hint
from distflow_jax.user_functions import load_function


def built_in() -> dict[str, pathlib.Path]:
    """Name -> file of the graphs that come with the project."""
    return {path.stem: path for path in sorted(BUILT_IN.glob("*.yaml"))}


def load_graph(name_or_path: str, config: Any = None) -> Graph:
    """The graph called so: a built-in name, a .yaml file, "module:function" or "file.py:function".

    `config` is what a file's `${section.key}` refer to; a function that has a parameter `config` is
    handed it. Raises ValueError or FileNotFoundError with what to write instead.
    """
    known = built_in()
    if name_or_path in known:
        return read_graph(known[name_or_path], config)
    if pathlib.Path(name_or_path).suffix in (".yaml", ".yml"):
        return read_graph(pathlib.Path(name_or_path), config)
    place, _, function = name_or_path.rpartition(":")
    if not place or not function:
        raise ValueError(
            f"dag: unknown pipeline {name_or_path!r} ({hint(name_or_path, known)}); or give a "
            ".yaml file, module:function, or file.py:function"
        )
    build = load_function(name_or_path, "pipeline")
    takes_config = "config" in inspect.signature(build).parameters
    graph = build(config=config) if takes_config else build()
    if not isinstance(graph, Graph):
        raise ValueError(
            f"pipeline {name_or_path!r} must return a Graph, got {type(graph).__name__}"
        )
    return graph
