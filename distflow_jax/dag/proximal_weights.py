"""Ages of tokens in a graph: a node that writes them, where settings need what follows from them.

Graphs, built in or a user's, are therefore the same in synchronous and asynchronous runs.
"""

import dataclasses

from distflow_jax.dag.graph import Graph, Node
from distflow_jax.layout import STEP, VERSION

NODE = "token_age"  # the id of the node, and the name of its stage
ALPHA = "prox_alpha"


def with_proximal_weights(graph: Graph) -> Graph:
    """Adds the weights of algorithm.proximal=a3po: every policy update reads them.

    A graph in which a node writes them, or an update reads another field for them, is unchanged,
    and so is one whose samplers write no versions.
    """
    updates = {node.id for node in graph.nodes if _updates_policy(node)}
    written = {field for node in graph.nodes for field in node.writes.values()}
    named = any(ALPHA in node.reads for node in graph.nodes if node.id in updates)
    if not updates or ALPHA in written or named or VERSION not in written:
        return graph
    ages = Node(
        NODE,
        "REWARD",
        "COMPUTE",
        reads=[VERSION, STEP],
        writes=[ALPHA],
        fn=NODE,
        scope="batch",
        deps=[node.id for node in graph.nodes if VERSION in node.writes.values()],
    )

    def changed(node: Node) -> Node:
        if node.id not in updates:
            return node
        return dataclasses.replace(
            node, reads={**node.reads, ALPHA: ALPHA}, deps=[*node.deps, ages.id]
        )

    return dataclasses.replace(graph, nodes=[*map(changed, graph.nodes), ages])


def _updates_policy(node: Node) -> bool:
    return (node.role, node.type, node.fn) == ("ACTOR", "MODEL_TRAIN", None) and node.options.get(
        "objective", "policy"
    ) == "policy"
