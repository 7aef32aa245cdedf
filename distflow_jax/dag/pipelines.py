"""Built-in graphs, and how a graph is found by its name.

A pipeline is a function that returns a Graph. Its parameters say which optional nodes a run needs.
"""

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

from distflow_jax.dag.graph import Graph, Node, hint
from distflow_jax.plugins import load_function


def grpo(use_reference: bool, recompute_old_logp: bool) -> Graph:
    """Group-relative policy optimization. Shao et al. 2024 (arxiv.org/abs/2402.03300).

    `use_reference` adds the log-probs of the frozen reference, for a KL penalty.
    `recompute_old_logp` adds the trainer's own log-probs before the update; without it the update
    takes old = stop_gradient(logp), which is exact where a batch gets one optimizer step.
    """
    response = ["prompt", "response", "response_mask"]
    nodes = [
        Node(
            "rollout",
            "ROLLOUT",
            "MODEL_INFERENCE",
            reads=["prompt"],
            writes=["response", "response_mask", "rollout_logp", "version", "finished"],
        ),
        Node(
            "reward",
            "REWARD",
            "COMPUTE",
            deps=["rollout"],
            reads=["prompt", "response", "finished"],
            writes=["score"],
        ),
        Node(
            "advantage",
            "ACTOR",
            "COMPUTE",
            deps=["reward"],
            reads=["score", "response_mask"],
            writes=["advantage"],
            scope="group",
        ),
    ]
    extra = []
    if recompute_old_logp:
        extra.append(
            Node("old_logp", "ACTOR", "MODEL_INFERENCE", ["rollout"], response, ["old_logp"])
        )
    if use_reference:
        extra.append(
            Node("reference", "REFERENCE", "MODEL_INFERENCE", ["rollout"], response, ["ref_logp"])
        )
    update = Node(
        "actor_train",
        "ACTOR",
        "MODEL_TRAIN",
        deps=["advantage", *(node.id for node in extra)],
        reads=[*response, "rollout_logp", "advantage", *(f for node in extra for f in node.writes)],
        scope="batch",
    )
    return Graph("grpo", [*nodes, *extra, update])


PIPELINES: dict[str, Callable[..., Graph]] = {"grpo": grpo}


def load_graph(name_or_path: str, **params: Any) -> Graph:
    """The graph called so: a built-in name, a .yaml file, "module:function" or "file.py:function".

    `params` are what the run offers; a function is handed those that its signature names. A YAML
    file stands as it is. Raises ValueError or FileNotFoundError with what to write instead.
    """
    if name_or_path in PIPELINES:
        return _build(name_or_path, PIPELINES[name_or_path], params)
    if pathlib.Path(name_or_path).suffix in (".yaml", ".yml"):
        return Graph.from_yaml(pathlib.Path(name_or_path))
    place, _, function = name_or_path.rpartition(":")
    if not place or not function:
        raise ValueError(
            f"unknown pipeline {name_or_path!r} ({hint(name_or_path, PIPELINES)}); or give a .yaml "
            "file, module:function, or file.py:function"
        )
    return _build(name_or_path, load_function(name_or_path, "pipeline"), params)


def _build(name: str, build: Callable[..., Graph], params: dict[str, Any]) -> Graph:
    takes = inspect.signature(build).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values()):
        params = {key: value for key, value in params.items() if key in takes}
    needed = [p.name for p in takes.values() if p.default is p.empty and p.kind not in _VARIADIC]
    missing = [key for key in needed if key not in params]
    if missing:
        raise ValueError(f"pipeline {name!r} needs a value for {', '.join(missing)}")
    graph = build(**params)
    if not isinstance(graph, Graph):
        raise ValueError(f"pipeline {name!r} must return a Graph, got {type(graph).__name__}")
    return graph


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
