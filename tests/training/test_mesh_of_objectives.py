"""Loss and gradient on a mesh are those of one device, for every objective but the policy's
(test_forward.py), and for losses that choose among all tokens of a step.

On 1 device, on fsdp 2 x tensor 2 and data 2 x fsdp 2, where rows are packed for several ranks, and
where devices share a row. Micro-batches of other sizes change nothing either.

Nightly: value, preference, KTO, reward-model, SFT and token-choosing objectives give the same
gradient on a mesh as on one device.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from support.gradients import assert_same
from support.tiny_model import TINY, mesh_of, mini_batch, random_params, random_samples, rows_of

from distflow_jax.batch import RowShape
from distflow_jax.config.algorithm_config import (
    AlgorithmConfig,
    PreferenceConfig,
    RewardModelConfig,
)
from distflow_jax.models.decoder_config import scalar_model
from distflow_jax.models.parameters import param_shardings
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives.kto_objective import KtoBatch, kto_objective
from distflow_jax.training.objectives.pair_objectives import (
    PreferenceBatch,
    RewardModelBatch,
    preference_objective,
    reward_model_objective,
)
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.objectives.sft_objective import SftBatch, sft_objective
from distflow_jax.training.update import UpdateShape, accumulate_gradients

FORWARD = ForwardConfig(logp_chunk=16)
SCALAR = scalar_model(TINY, head_stddev=0.1)
CHOOSING = {  # losses that choose among all tokens of the step, by the policy as it stands
    "kl_cov": AlgorithmConfig(policy_loss="kl_cov", kl_cov_share=0.2, correction="token_tis"),
    "clip_cov": AlgorithmConfig(
        policy_loss="clip_cov", clip_cov_ratio=0.1, clip_cov_lb=0.01, clip_cov_ub=9.0
    ),
}
OBJECTIVES = {
    **{k: policy_objective(TINY, a, FORWARD, max_response=14) for k, a in CHOOSING.items()},
    "preference": preference_objective(TINY, PreferenceConfig("dpo", 0.3), FORWARD),
    "orpo": preference_objective(TINY, PreferenceConfig("orpo", 0.3), FORWARD),
    "kto": kto_objective(TINY, PreferenceConfig("dpo", 0.05, 1.2, 0.7), FORWARD),
    "reward_model": reward_model_objective(SCALAR, RewardModelConfig(0.2, 0.05), FORWARD),
    "sft": sft_objective(TINY, FORWARD),
}


def batch_of(name, ranks):
    """Five pairs: an odd number, so that ranks differ in what they hold."""
    samples = random_samples(3, groups=5, size=2)
    rows, _ = rows_of(samples, RowShape(1, 4, 64, 4), shared=True, ranks=ranks, group_size=2)
    rows = mini_batch(rows)
    # a reference that knows the token alone, wherever it lies
    ref_logp = jnp.where(rows.response_mask, -1.0 - (rows.tokens % 7).astype(jnp.float32), 0.0)
    advantage = jnp.where(rows.response_mask, jnp.sin(rows.tokens.astype(jnp.float32)), 0.0)
    policy = PolicyBatch(rows, advantage, ref_logp + 0.1, ref_logp, None)
    batches = {
        **dict.fromkeys(CHOOSING, lambda: policy),
        "preference": lambda: PreferenceBatch(rows, ref_logp),
        "orpo": lambda: PreferenceBatch(rows),
        "kto": lambda: KtoBatch(rows, ref_logp - 3.0, (rows.group % 2).astype(jnp.float32)),
        "reward_model": lambda: RewardModelBatch(rows),
        "sft": lambda: SftBatch(rows),
    }
    return batches[name]()


@functools.cache
def gradient_of(name, fsdp, tensor, micro=1, **axes):
    """(gradient, metrics with the loss among them) on the host; `micro`: rows of a micro-batch."""
    objective, mesh = OBJECTIVES[name], mesh_of(fsdp, tensor, **axes)
    network = objective.model
    params = jax.device_put(random_params(network), param_shardings(network, mesh))
    shape = UpdateShape(mesh, micro * mesh.shape.get("pipeline", 1), 14)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params, batch):
        with use_mesh(mesh):
            return accumulate_gradients(
                params,
                batch,
                jnp.float32(1),
                shape=shape,
                objective=objective,
                first=jnp.bool_(False),
                updates=2,
            )

    return jax.device_get(run(params, batch_of(name, shape.ranks)))


@pytest.mark.parametrize(
    "name, axes",
    [
        pytest.param("preference", dict(fsdp=2, tensor=2), marks=pytest.mark.slow),
        ("clip_cov", dict(fsdp=2, tensor=2)),
        pytest.param("kto", dict(fsdp=2, tensor=1, data=2), marks=pytest.mark.slow),
        pytest.param("orpo", dict(fsdp=2, tensor=1, data=2), marks=pytest.mark.slow),
        pytest.param("kto", dict(fsdp=1, tensor=2, context=2), marks=pytest.mark.slow),
        pytest.param("kto", dict(fsdp=1, tensor=1, micro=4), marks=pytest.mark.slow),
        pytest.param("orpo", dict(fsdp=1, tensor=1, micro=2), marks=pytest.mark.slow),
        pytest.param("kl_cov", dict(fsdp=2, tensor=1, data=2), marks=pytest.mark.slow),
        pytest.param("kl_cov", dict(fsdp=1, tensor=1, context=4), marks=pytest.mark.slow),
        pytest.param("clip_cov", dict(fsdp=1, tensor=2, pipeline=2), marks=pytest.mark.slow),
        pytest.param("reward_model", dict(fsdp=2, tensor=2), marks=pytest.mark.slow),
        pytest.param("reward_model", dict(fsdp=2, tensor=1, data=2), marks=pytest.mark.slow),
        pytest.param("preference", dict(fsdp=2, tensor=2, data=2), marks=pytest.mark.slow),
        ("reward_model", dict(fsdp=1, tensor=1, context=4)),
        pytest.param("preference", dict(fsdp=1, tensor=2, context=2), marks=pytest.mark.slow),
        pytest.param("reward_model", dict(fsdp=1, tensor=2, pipeline=2), marks=pytest.mark.slow),
        pytest.param("preference", dict(fsdp=2, tensor=1, pipeline=2), marks=pytest.mark.slow),
        pytest.param("sft", dict(fsdp=2, tensor=2), marks=pytest.mark.slow),
    ],
)
def test_one_device_and_a_mesh_give_the_same_gradient(name, axes):
    one = gradient_of(name, 1, 1)
    assert abs(one[1][f"{OBJECTIVES[name].name}/loss"]) > 0
    assert one[1].get("kto/kl", 1) > 0
    assert_same(gradient_of(name, **axes), one)
