"""Images of responses in a graph: samplers write what their environments showed, for rows.

Graphs, built in or a user's, are therefore the same for models that see and for those that do not.
"""

import dataclasses

from distflow_jax.dag.graph import Graph, Node
from distflow_jax.layout import RESPONSE_IMAGES


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


def _samples(node: Node) -> bool:
    """Whether a node is a sampler whose responses become rows."""
    kind = (node.role, node.type, node.fn)
    return kind == ("ROLLOUT", "MODEL_INFERENCE", None) and "response" in node.writes.values()
