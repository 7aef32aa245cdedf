"""Graphs by their name: the built-in ones are the YAML files of configs/dags."""

import inspect
import pathlib
from typing import Any

from distflow_jax.dag.graph import Graph
from distflow_jax.dag.graph_yaml import BUILT_IN, OpenedGraph, open_yaml
from distflow_jax.did_you_mean import hint
from distflow_jax.user_functions import load_function


def built_in() -> dict[str, pathlib.Path]:
    """Name -> file of the graphs that come with the project."""
    return {path.stem: path for path in sorted(BUILT_IN.glob("*.yaml"))}


def load_graph(name_or_path: str, config: Any = None) -> Graph:
    """The graph of that name: a built-in one, a .yaml file, "module:function", "file.py:function".

    A file's `${section.key}` take their values from `config`; a function that has a parameter
    `config` is handed it. Raises ValueError or FileNotFoundError with what to write instead.
    """
    return open_graph(name_or_path, config).build(config)


def open_graph(name_or_path: str, config: Any = None) -> OpenedGraph:
    """The graph of that name, read once: its settings, and a way to build it when they are known.

    A function is called here, with `config` before the settings. Raises as `load_graph` does.
    """
    known = built_in()
    if name_or_path in known:
        return open_yaml(known[name_or_path], config)
    if pathlib.Path(name_or_path).suffix in (".yaml", ".yml"):
        return open_yaml(pathlib.Path(name_or_path), config)
    place, _, function = name_or_path.rpartition(":")
    if not place or not function:
        raise ValueError(
            f"dag: unknown pipeline {name_or_path!r} ({hint(name_or_path, known)}); or give a "
            ".yaml file, module:function, or file.py:function"
        )
    make = load_function(name_or_path, "pipeline")
    takes_config = "config" in inspect.signature(make).parameters
    graph = make(config=config) if takes_config else make()
    if not isinstance(graph, Graph):
        raise ValueError(
            f"pipeline {name_or_path!r} must return a Graph, got {type(graph).__name__}"
        )
    return OpenedGraph(graph.settings, lambda config: graph)
