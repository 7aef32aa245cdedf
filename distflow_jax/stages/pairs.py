"""From scored groups to preference pairs: the best and the worst response of each prompt."""

import numpy as np

from distflow_jax.dag.plan_walker import Stage
from distflow_jax.stages.stage_context import RewardContext


def build_choose_pairs(context: RewardContext) -> Stage:
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
