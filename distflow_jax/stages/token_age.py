"""Ages of tokens: how many training steps newer the trained weights are than those that sampled."""

import numpy as np

from distflow_jax.dag.plan_walker import Stage
from distflow_jax.layout import STEP, VERSION
from distflow_jax.stages.stage_context import RewardContext


def build_token_age(context: RewardContext) -> Stage:
    """version, int32 [T] each, and step, int64 [N] -> age, and prox_alpha if the node writes it;
    float32 [T] each.

    A token that step s trains was sampled by version v at age s - 1 - v. Of age d it has prox_alpha
    d / (d + 1): the sampler's policy where it is the proximal one, and nearer to the policy that is
    being trained the older it is (correction.a3po_alpha, for a policy one step after the proximal
    one).
    """
    node = context.node

    def token_age(state, fields, options):
        ages = [
            np.asarray(step - 1 - version, np.float32)
            for version, step in zip(fields[VERSION], fields[STEP], strict=True)
        ]
        written = {"age": ages, "prox_alpha": [age / (age + 1) for age in ages]}
        return state, {name: written[name] for name in node.writes}, {}

    return token_age
