"""Fields that settings and models add to a graph: environment rewards, ages of tokens, images that
a model sees, experts of a mixture.

Graphs, built in or a user's, are therefore the same with and without an environment, in synchronous
and asynchronous runs, and for all models.
"""

import dataclasses
from collections.abc import Sequence

from distflow_jax.dag.graph import Graph, Node
from distflow_jax.layout import RESPONSE_IMAGES, ROUTED_EXPERTS, STEP, VERSION

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
