"""Several scores of a response into one, each logged by its name."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.dag.plan_walker import Stage
from distflow_jax.layout import Parts
from distflow_jax.observe.metrics import merge
from distflow_jax.stages.stage_context import RewardContext


def build_weighted_sum(context: RewardContext) -> Stage:
    """{name: scores, float32 [N]} -> score, float32 [N]: the sum of weight x score.

    The names are those of the node's reads; `options: {weights: {name: number}}` has a weight for
    each. Logs reward/{name} as the mean over all processes.
    """
    node = context.node
    weights = node.options.get("weights")
    if not isinstance(weights, Mapping) or set(weights) != set(node.reads):
        given = weights if weights is None else sorted(weights)
        raise ValueError(
            f"node {node.id!r}: options.weights must have one number for each of "
            f"{sorted(node.reads)}, got {given}"
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(
                f"node {node.id!r}: options.weights.{name} must be a number, got {weight!r}"
            )

    def weighted_sum(state, fields, options):
        scores = {name: np.asarray(fields[name], np.float32) for name in node.reads}
        total = sum(np.float32(weights[name]) * scores[name] for name in node.reads)
        sums = {name: [float(score.sum()), len(score)] for name, score in scores.items()}
        return state, {"score": total}, {node.id: Parts((sums,), merged)}

    def merged(parts: Sequence[Any]) -> dict[str, float]:
        return {f"{context.prefix}reward/{name}": mean for name, mean in merge(parts).items()}

    return weighted_sum
