"""Ages of tokens: how many training steps newer the trained weights are than those that sampled."""

import numpy as np

from distflow_jax.algorithms.correction import A3PO, a3po_alpha
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.layout import STEP, VERSION
from distflow_jax.stages.stage_context import RewardContext


def build_token_age(context: RewardContext) -> Stage:
    """version, int32 [T] each, and step, int64 [N] -> age, and prox_alpha if the node writes it;
    float32 [T] each.

    A token that step s trains was sampled by version v at age s - 1 - v. prox_alpha is the weight
    of the policy that is being trained in the proximal one (correction.a3po_alpha).
    """
    node, proximal_age = context.node, A3PO.get(context.algorithm.proximal, 0)

    def token_age(state, fields, options):
        ages = [
            np.asarray(step - 1 - version, np.float32)
            for version, step in zip(fields[VERSION], fields[STEP], strict=True)
        ]
        written = {"age": ages, "prox_alpha": [a3po_alpha(age, proximal_age) for age in ages]}
        return state, {name: written[name] for name in node.writes}, {}

    return token_age
