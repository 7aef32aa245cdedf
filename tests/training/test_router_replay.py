"""Training through recorded experts: log-probs, losses and gradients are those of an exact forward
pass through them, wherever sequences lie.

Tolerances as in test_forward.py.

Nightly: training through recorded experts is exact where 8 devices share rows and experts' widths.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.exact_mixture import exact, same_sets
from support.gradients import assert_same, likelihood_gradient
from support.tiny_model import (
    MIXTURE,
    mesh_of,
    mini_batch,
    random_experts,
    random_params,
    random_samples,
    rows_of,
    values_of,
    with_experts,
)

from distflow_jax.batch import RowShape, TokenColumn
from distflow_jax.config.run_config import Config
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.layout import ROUTED_EXPERTS
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.moe import recorded_dtype
from distflow_jax.models.parameters import param_shardings
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import settle
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.training.forward import ForwardConfig, response_logp

PARAMS = random_params(MIXTURE)
SAMPLES = random_samples(0, groups=3, size=3)
FORWARD = ForwardConfig(logp_chunk=16, remat="none")
SHAPE = RowShape(1, 4, 128, 8)
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "own prompts"])
RECORDED = random_experts(SAMPLES, MIXTURE)
COEF = np.float32(0.7)  # of the balance


@functools.cache
def wanted():
    """The outputs of each sample through the recorded experts."""
    return [
        exact(MIXTURE, PARAMS, np.concatenate([prompt.tokens, response]), recorded)
        for prompt, response, recorded in zip(
            SAMPLES.prompt, SAMPLES.response, RECORDED, strict=True
        )
    ]


def packed_rows(shared, recorded, *, ranks=1):
    rows, placement = rows_of(SAMPLES, SHAPE, shared=shared, ranks=ranks)
    assert shared == bool((rows.parent > SHAPE.sequences).any())
    if recorded is not None:
        rows = with_experts(rows, placement, SAMPLES, recorded)
        assert rows.experts.dtype == np.int8 and (rows.experts[rows.segment == 0] == -1).all()
    return rows, placement


@jax.jit
def logp_of(params, rows):
    return response_logp(params, MIXTURE, rows, jnp.float32(1), FORWARD)[0]


def logp_of_samples(shared, recorded):
    rows, placement = packed_rows(shared, recorded)
    return values_of(SAMPLES, placement, np.asarray(logp_of(PARAMS, mini_batch(rows)))[None])


@SHARED
def test_log_probs_are_those_of_the_recorded_experts(shared):
    found, plain = (logp_of_samples(shared, recorded) for recorded in (RECORDED, None))
    off = []
    for i, of_sample in enumerate(wanted()):
        mask = SAMPLES.response_mask[i]
        here = of_sample.logp[len(SAMPLES.prompt[i].tokens) - 1 :]
        np.testing.assert_allclose(found[i][mask], here[mask], atol=1e-4)
        off += np.abs(plain[i] - found[i])[mask].tolist()
    assert np.mean(off) > 0.1  # other experts say other things


def test_the_routers_own_choice_changes_nothing():
    own = [
        exact(MIXTURE, PARAMS, np.concatenate([p.tokens, r])).own.astype(np.int8)
        for p, r in zip(SAMPLES.prompt, SAMPLES.response, strict=True)
    ]
    found, plain = (logp_of_samples(True, recorded) for recorded in (own, None))
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@functools.cache
def losses(shared):
    """(gradient, metrics) on one device."""
    rows, _ = packed_rows(shared, RECORDED)
    options = dict(model=MIXTURE, mesh=mesh_of(1, 1))
    return jax.device_get(likelihood_gradient(PARAMS, mini_batch(rows), COEF, **options))


def test_shared_prompts_give_what_own_prompts_give():
    assert_same(losses(True), losses(False))
    router = losses(True)[0]["layers"]["router"]
    assert np.abs(router).max() > 1e-3  # it weighs what it did not choose


def test_the_share_of_what_routers_would_have_sent_elsewhere():
    """And the load is that of the experts which tokens went through."""
    differs, load = [], np.zeros((MIXTURE.num_layers, MIXTURE.num_experts))
    nll, learned = 0.0, 0
    for i, of_sample in enumerate(wanted()):
        known = RECORDED[i][..., 0] >= 0
        went = np.where(known[..., None], RECORDED[i], of_sample.own)
        differs += (~same_sets(went, of_sample.own))[known].tolist()
        for layer in range(MIXTURE.num_layers):
            load[layer] += np.bincount(went[:, layer].reshape(-1), minlength=MIXTURE.num_experts)
        mask = SAMPLES.response_mask[i]
        nll -= of_sample.logp[len(SAMPLES.prompt[i].tokens) - 1 :][mask].sum()
        learned += mask.sum()
    _, metrics = losses(True)
    share = np.mean(differs)
    assert 0.5 < share < 1  # of what is drawn at random some is the routers' choice
    np.testing.assert_allclose(metrics["actor/router_mismatch"], share, rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/nll"], nll / learned, rtol=1e-5)
    busiest = (load / load.sum(-1, keepdims=True)).max()
    np.testing.assert_allclose(metrics["actor/expert_share_max"], busiest, rtol=1e-5)


@pytest.mark.slow
def test_8_devices_that_share_rows_and_experts_widths():
    mesh = mesh_of(2, 2, context=2)
    rows, _ = packed_rows(True, RECORDED, ranks=2)
    params = jax.device_put(PARAMS, param_shardings(MIXTURE, mesh))
    options = dict(model=MIXTURE, mesh=mesh, micro=1, remat="full")
    got = likelihood_gradient(params, mini_batch(rows), COEF, **options)
    assert_same(jax.device_get(got), losses(True))


# -- config ----------------------------------------------------------------------------------------

REPLAY = Config(training=TrainingConfig(router_replay=True))


def test_what_is_recorded_is_as_small_as_it_can_be():
    assert recorded_dtype(128) == np.int8 and recorded_dtype(129) == np.int16
    machine = Machine(1, 1, 1, "cpu")
    for experts, dtype in ((8, "int8"), (160, "int16")):
        model = dataclasses.replace(DecoderConfig(), num_experts=experts, experts_per_token=2)
        sizes = derive_sizes(REPLAY, model, machine)
        assert sizes.routed == TokenColumn((6, 2), dtype, prompt=True, fill=-1)
        assert sizes.engine.record_experts
        off = derive_sizes(Config(), model, machine)
        assert off.routed is None and not off.engine.record_experts


def test_a_dense_model_has_nothing_to_replay():
    with pytest.raises(
        ValueError, match="router_replay=True is for a mixture of experts, .* use False"
    ):
        derive_sizes(REPLAY, DecoderConfig(), Machine(1, 1, 1, "cpu"))


@pytest.mark.parametrize("dag", ["grpo", "ppo", "dapo", "remax", "online_dpo"])
def test_policies_read_what_their_sampler_writes(dag):
    config = dataclasses.replace(REPLAY, dag=dag)
    config = dataclasses.replace(
        config, training=dataclasses.replace(config.training, mini_batches=2)
    )
    _, graph = settle(config)
    reads = {n.id for n in graph.nodes if ROUTED_EXPERTS in n.reads}
    writes = {n.id for n in graph.nodes if ROUTED_EXPERTS in n.writes}
    old_logp = {"old_logp"} & {n.id for n in graph.nodes}
    assert old_logp or dag == "online_dpo"
    assert reads == {"actor_train"} | old_logp
    assert writes == {"rollout"}
    _, without = settle(dataclasses.replace(config, training=TrainingConfig(mini_batches=2)))
    assert not any(ROUTED_EXPERTS in (*n.reads, *n.writes) for n in without.nodes)


@pytest.mark.parametrize(
    ("dag", "message"),
    [
        ("sft", "node 'actor_train': .* needs 'response' from one node .* there is none; use Fal"),
        ("reward_model", "'reward_model': .*router_replay=True needs a graph that trains a pol"),
    ],
)
def test_responses_that_nobody_recorded(dag, message):
    with pytest.raises(ValueError, match=message):
        settle(dataclasses.replace(REPLAY, dag=dag))
