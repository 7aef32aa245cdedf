"""The update stage: what a setting needs is named before anything runs."""

import types

import pytest
from support.tiny_model import TINY, mesh_of

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.stages.update_model import build_policy_update
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from distflow_jax.training.update import UpdateShape


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"kl_coef": 0.1}, "ref_logp"),
        ({"policy_loss": "kl_cov"}, "old_logp"),
        ({"correction": "token_tis"}, "rollout_logp"),
        ({"proximal": "a3po"}, "prox_alpha, rollout_logp"),
    ],
)
def test_what_is_missing_is_named(options, missing):
    context = types.SimpleNamespace(
        model=TINY,
        algorithm=AlgorithmConfig(**options),
        forward=ForwardConfig(),
        shape=UpdateShape(mesh_of(1, 1), 1, 8),
        optimizer=make_optimizer(OptimizerConfig(), 1),
        schedule=learning_rate(OptimizerConfig(), 1),
        temperature=1.0,
        epochs=1,
        mini_batches=1,
        balance_coef=0.0,
        max_lag=0,
    )
    stage = build_policy_update(context)
    with pytest.raises(ValueError, match=f"needs {missing}: add that to the node's reads") as error:
        stage(None, {"rows": None, "advantage": None}, {})
    key, value = next(iter(options.items()))
    assert f"algorithm.{key}={value!r}" in str(error.value)
