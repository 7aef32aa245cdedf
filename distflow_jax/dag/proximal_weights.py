"""Ages of tokens in a graph: a node that writes them, where settings need what follows from them.

Graphs, built in or a user's, are therefore the same in synchronous and asynchronous runs.
"""

import dataclasses
from collections.abc import Sequence

from distflow_jax.dag.graph import Graph, Node
from distflow_jax.layout import STEP, VERSION

NODE = "token_age"  # the id of the node, and the name of its stage
ALPHA = "prox_alpha"
AGE = "age"


def with_ages(graph: Graph, fields: Sequence[str]) -> Graph:
    """Adds what follows from ages, `fields` of AGE and ALPHA: every policy update reads them.

    A field that a node of the graph writes, or for which an update reads another one, is left to
    the graph. One whose samplers write no versions is unchanged.
    """
    updates = {node.id for node in graph.nodes if _updates_policy(node)}
    written = {field for node in graph.nodes for field in node.writes.values()}
    named = {name for node in graph.nodes if node.id in updates for name in node.reads}
    fields = [field for field in fields if field not in written | named]
    if not updates or not fields or VERSION not in written:
        return graph
    ages = Node(
        NODE,
        "REWARD",
        "COMPUTE",
        reads=[VERSION, STEP],
        writes=fields,
        fn=NODE,
        scope="batch",
        deps=[node.id for node in graph.nodes if VERSION in node.writes.values()],
    )

    def changed(node: Node) -> Node:
        if node.id not in updates:
            return node
        return dataclasses.replace(
            node,
            reads=dict(node.reads) | dict(zip(fields, fields, strict=True)),
            deps=[*node.deps, ages.id],
        )

    return dataclasses.replace(graph, nodes=[*map(changed, graph.nodes), ages])


def _updates_policy(node: Node) -> bool:
    return (node.role, node.type, node.fn) == ("ACTOR", "MODEL_TRAIN", None) and node.options.get(
        "objective", "policy"
    ) == "policy"
