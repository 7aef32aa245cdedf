"""Stages that read scores alone: a weighted sum of several, each logged by its name, and pairs of
the best and the worst response of each prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.dag.plan_walker import Stage
from distflow_jax.layout import Parts
from distflow_jax.observe.metrics import merge
from distflow_jax.stages.stage_context import ComputeContext


def build_weighted_sum(context: ComputeContext) -> Stage:
    """{name: scores, float32 [N]} -> score, float32 [N]: the sum of weight x score.

    The names are those of the node's reads; `options: {weights: {name: number}}` has a weight for
    each. Logs reward/{name} as the mean over the responses of all processes that have this score.
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
        sums = {n: [float(np.nansum(x)), int((~np.isnan(x)).sum())] for n, x in scores.items()}
        return state, {"score": total}, {node.id: Parts((sums,), merged)}

    def merged(parts: Sequence[Any]) -> dict[str, float]:
        return {f"{context.prefix}reward/{name}": mean for name, mean in merge(parts).items()}

    return weighted_sum


def build_choose_pairs(context: ComputeContext) -> Stage:
    """uid, score -> keep, int [N]: 1 for the best of a group, 2 for the worst, 0 for the others.

    The first of equals is taken, and none without a score (NaN). A group whose scores are all equal
    says nothing about what is better, and goes. Guo et al. 2024 (online DPO,
    arxiv.org/abs/2402.04792), sec. 3.
    """
    if context.num_samples < 2:
        raise ValueError(
            f"node {context.node.id!r}: a pair takes two responses to a prompt, and "
            f"rollout.num_samples={context.num_samples}; use at least 2"
        )

    def choose(state, fields, options):
        score = np.asarray(fields["score"], np.float64)
        keep = np.zeros(len(score), np.int32)
        counters = fields["uid"][:, 0]
        for counter in np.unique(counters):
            (members,) = np.nonzero((counters == counter) & ~np.isnan(score))
            if not len(members):
                continue
            best, worst = (members[pick(score[members])] for pick in (np.argmax, np.argmin))
            if score[best] > score[worst]:
                keep[best], keep[worst] = 1, 2
        return state, {"keep": keep}, {}

    return choose
