"""Environment rewards in a graph: an edge from samplers to the nodes that compute scores.

Graphs, built in or a user's, are therefore the same with and without an environment.
"""

import dataclasses

from distflow_jax.dag.graph import Graph, Node

FIELD = "environment_reward"


def with_environment_rewards(graph: Graph) -> Graph:
    """Adds the environments' rewards to a graph.

    Every sampler writes them, and every node of a reward function that reads a sampler's responses
    reads them too. Nodes that name the field themselves, or have a function, are unchanged.
    """
    samplers = [n for n in graph.nodes if _is(n, "ROLLOUT", "MODEL_INFERENCE")]
    field_of = {n.id: FIELD if len(samplers) == 1 else f"{n.id}_{FIELD}" for n in samplers}
    field_of |= {n.id: n.writes[FIELD] for n in samplers if FIELD in n.writes}
    of_response = {n.writes["response"]: field_of[n.id] for n in samplers if "response" in n.writes}
    nodes = []
    for node in graph.nodes:
        if node.id in field_of:
            writes = {**node.writes, FIELD: field_of[node.id]}
            node = dataclasses.replace(node, writes=writes)
        response = node.reads.get("response")
        if _is(node, "REWARD", "COMPUTE") and response in of_response and FIELD not in node.reads:
            node = dataclasses.replace(node, reads={**node.reads, FIELD: of_response[response]})
        nodes.append(node)
    return dataclasses.replace(graph, nodes=nodes)


def _is(node: Node, role: str, type: str) -> bool:
    return (node.role, node.type) == (role, type) and node.fn is None
