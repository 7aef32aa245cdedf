"""The update stage: what a setting needs is named before anything runs; a batch in partial
batches."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gradients import distance
from support.partial_batches import cut, rows_of_groups
from support.tiny_model import TINY, mesh_of, random_params, random_samples, rows_of

from distflow_jax.batch import RowShape
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.training_config import OptimizerConfig
from distflow_jax.models.parameters import param_shardings
from distflow_jax.stages.update_model import build_policy_update, merged_updates
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.optimizer import learning_rate, make_optimizer
from distflow_jax.training.state import init_state
from distflow_jax.training.update import UpdateShape, empty, with_sums

MINI_BATCHES, GROUPS = 2, 6


def context_of(mini_batches=1, **options):
    optimizer = OptimizerConfig(lr=3e-3)
    return types.SimpleNamespace(
        node=types.SimpleNamespace(id="actor_train"),
        prefix="",
        model=TINY,
        algorithm=AlgorithmConfig(**options),
        forward=ForwardConfig(logp_chunk=16),
        shape=UpdateShape(mesh_of(1, 1), 2, 14),
        optimizer=make_optimizer(optimizer, 4),
        schedule=learning_rate(optimizer, 4),
        temperature=0.8,
        epochs=1,
        mini_batches=mini_batches,
        balance_coef=0.0,
        max_staleness=0,
        num_groups=0,
    )


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
    stage = build_policy_update(context_of(**options))
    with pytest.raises(ValueError, match=f"needs {missing}: add that to the node's reads") as error:
        stage(None, {"rows": None, "advantage": None}, {})
    key, value = next(iter(options.items()))
    assert f"algorithm.{key}={value!r}" in str(error.value)


@pytest.fixture(scope="module")
def batch():
    """Fields [K, R, ...] of a batch whose groups are divided over two mini-batches."""
    samples = random_samples(0, groups=GROUPS, size=4)
    rows, _ = rows_of(samples, RowShape(MINI_BATCHES, 8, 64, 4), shared=True)
    rows = jax.tree.map(jnp.asarray, rows)
    mask, number = rows.response_mask, rows.tokens.astype(jnp.float32)
    fields = {"advantage": jnp.sin(number), "rollout_logp": -1.0 - number % 5}
    return {"rows": rows} | {k: jnp.where(mask, x, 0.0) for k, x in fields.items()}


def test_mini_batches_in_partial_batches_are_the_batch_at_once(batch):
    """Each is begun and finished by itself, with partial batches of its own groups: state and
    metrics are those of the stage that is called with the whole batch."""
    context = context_of(MINI_BATCHES, proximal="rollout")
    stage, mesh = build_policy_update(context), context.shape.mesh

    def first():
        params = jax.device_put(random_params(TINY), param_shardings(TINY, mesh))
        return init_state(params, TINY, context.optimizer, mesh)

    wanted, fields, metrics = jax.jit(stage)(first(), batch, {})
    assert fields == {} and int(wanted.count) == MINI_BATCHES
    state, found = first(), []
    accumulate, finish = jax.jit(stage.accumulate), jax.jit(stage.finish)
    for k in range(MINI_BATCHES):
        mini = jax.tree.map(lambda x, k=k: x[k : k + 1], batch)
        state = with_sums(state, empty(stage.sums_of(state, mini)))
        for part_G in cut(k, GROUPS, partial_batches=4):
            partial_batch = mini | {"rows": rows_of_groups(mini["rows"], part_G)}
            state, fields, none = accumulate(state, partial_batch, {})
            assert fields == none == {}
        state, new = finish(state)
        found.append(new)
    merged = merged_updates(found)
    assert merged.keys() == metrics.keys() and "training/nonfinite/actor_train" in merged
    for name, value in metrics.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert int(state.count) == MINI_BATCHES
    assert distance(jax.device_get(state.params), jax.device_get(wanted.params)) < 1e-5


def test_metrics_are_those_of_the_updates_that_had_sequences(batch):
    """Of a step with fewer groups than others the last mini-batches are empty. Gaps of groups, an
    array of them, are merged alike."""
    context = context_of(MINI_BATCHES, proximal="rollout")
    context.num_groups = GROUPS
    stage, mesh = jax.jit(build_policy_update(context)), context.shape.mesh

    def metrics_of(fields):
        params = jax.device_put(random_params(TINY), param_shardings(TINY, mesh))
        state = init_state(params, TINY, context.optimizer, mesh)
        state, _, metrics = stage(state, fields, {})
        return int(state.count), metrics

    first_only = jax.tree.map(lambda x: x.at[1:].set(jnp.zeros((), x.dtype)), batch)
    steps, found = metrics_of(first_only)
    assert steps == 1
    alone = context_of(1, proximal="rollout")
    alone.num_groups = GROUPS
    first = build_policy_update(alone)
    params = jax.device_put(random_params(TINY), param_shardings(TINY, mesh))
    state = init_state(params, TINY, context.optimizer, mesh)
    _, _, wanted = jax.jit(first)(state, jax.tree.map(lambda x: x[:1], batch), {})
    assert wanted.keys() == found.keys() and wanted["actor/grad_norm"] > 0
    assert found["rollout_corr/gap_of_group"].shape == (GROUPS,)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    steps, none = metrics_of(jax.tree.map(jnp.zeros_like, batch))
    assert steps == 0 and none["actor/loss"] == none["actor/grad_norm"] == 0
