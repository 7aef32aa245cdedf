"""Fields of responses that a model adds to a graph: images that it sees, experts of a mixture.

Graphs, built in or a user's, are therefore the same for all models.
"""

import dataclasses

from distflow_jax.dag.graph import Graph, Node
from distflow_jax.layout import RESPONSE_IMAGES, ROUTED_EXPERTS


def with_response_images(graph: Graph) -> Graph:
    """Adds the images of responses to the samplers whose responses become rows.

    No node reads them: they are packed where rows are.
    """
    nodes = [
        dataclasses.replace(node, writes={**node.writes, RESPONSE_IMAGES: RESPONSE_IMAGES})
        if _samples(node)
        else node
        for node in graph.nodes
    ]
    return dataclasses.replace(graph, nodes=nodes)


def with_router_replay(graph: Graph) -> Graph:
    """Adds the field of routed experts to a graph.

    The sampler of the packed responses writes it; every node that trains the sampler's policy, or
    takes log-probs of it, reads it. References and all other models route by themselves.

    Raises:
      ValueError: no policy is trained, or one is trained on responses that no sampler with its
        weights records.
    """
    samplers = [node for node in graph.nodes if _samples(node)]
    trained = [n for n in graph.nodes if _is_of_policy(n) and n.type == "MODEL_TRAIN"]
    if not trained:
        raise ValueError(
            "training.router_replay=True needs a graph that trains a policy; use False"
        )
    for node in trained:
        if [_policy(sampler) for sampler in samplers] != [_policy(node)]:
            raise ValueError(
                f"node {node.id!r}: training.router_replay=True needs 'response' from one node "
                f"ROLLOUT MODEL_INFERENCE, without fn, of model {_policy(node)!r}, which records "
                f"experts, and there is {_shown(samplers)}; use False"
            )
    (sampler,) = samplers
    field = sampler.writes.get(ROUTED_EXPERTS, ROUTED_EXPERTS)

    def changed(node: Node) -> Node:
        if node is sampler:
            return dataclasses.replace(node, writes={**node.writes, ROUTED_EXPERTS: field})
        if _is_of_policy(node) and _policy(node) == _policy(sampler):
            return dataclasses.replace(node, reads={**node.reads, ROUTED_EXPERTS: field})
        return node

    return dataclasses.replace(graph, nodes=[changed(node) for node in graph.nodes])


def _samples(node: Node) -> bool:
    """Whether a node is a sampler whose responses become rows."""
    kind = (node.role, node.type, node.fn)
    return kind == ("ROLLOUT", "MODEL_INFERENCE", None) and "response" in node.writes.values()


def _is_of_policy(node: Node) -> bool:
    """Whether a node runs a policy's network over rows with a built-in stage."""
    return node.role == "ACTOR" and node.type != "COMPUTE" and node.fn is None


def _policy(node: Node) -> str:
    """Key of the policy's state (planning/run_models.py)."""
    return node.model or "actor"


def _shown(samplers: list[Node]) -> str:
    return " and ".join(f"{n.id!r} of {_policy(n)!r}" for n in samplers) or "none"
