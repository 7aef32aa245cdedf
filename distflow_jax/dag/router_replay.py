"""Router replay in a graph: what trains a policy reads which experts its sampler's tokens went
through.

So no graph, built in or a user's, has to know whether its policy is a mixture.
"""

import dataclasses

from distflow_jax.dag.graph import Graph, Node
from distflow_jax.layout import ROUTED_EXPERTS


def with_router_replay(graph: Graph) -> Graph:
    """The graph in which the sampler of the responses that are packed writes their routed experts,
    and every node that trains its policy, or takes log-probs of it, reads them.

    A reference routes by itself, and so does every other model. Raises ValueError where a policy is
    trained on responses that no sampler with its weights records, or none is trained.
    """
    samplers = [node for node in graph.nodes if _samples(node)]
    trained = [n for n in graph.nodes if _is_of_policy(n) and n.type == "MODEL_TRAIN"]
    if not trained:
        raise ValueError("training.router_replay=True is for a policy, and none is trained")
    for node in trained:
        if [_policy(sampler) for sampler in samplers] != [_policy(node)]:
            raise ValueError(
                f"node {node.id!r}: training.router_replay=True needs 'response' from one node "
                f"ROLLOUT MODEL_INFERENCE, without fn, of model {_policy(node)!r}: that is what "
                f"records experts, and there is {_shown(samplers)}; use False"
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
    """Whether it is a sampler whose responses become rows."""
    kind = (node.role, node.type, node.fn)
    return kind == ("ROLLOUT", "MODEL_INFERENCE", None) and "response" in node.writes.values()


def _is_of_policy(node: Node) -> bool:
    """Whether it runs a policy's network over rows, as a default stage does."""
    return node.role == "ACTOR" and node.type != "COMPUTE" and node.fn is None


def _policy(node: Node) -> str:
    """Key of the policy's state (planning/run_models.py)."""
    return node.model or "actor"


def _shown(samplers: list[Node]) -> str:
    return " and ".join(f"{n.id!r} of {_policy(n)!r}" for n in samplers) or "none"
