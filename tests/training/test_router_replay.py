"""Training through recorded experts: log-probs, losses and gradients are those of an exact forward
pass through them, wherever sequences lie.

Tolerances as in test_forward.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_mixture import exact, same_sets
from tiny_model import (
    TINY,
    mesh_of,
    mini_batch,
    random_params,
    random_samples,
    rows_of,
    sequences_of,
    values_of,
)

from distflow_jax.batch import RowShape, TokenColumn, token_field
from distflow_jax.config import Config
from distflow_jax.machine import Machine
from distflow_jax.models.config import DecoderConfig
from distflow_jax.models.moe import recorded_dtype
from distflow_jax.models.parameters import param_shardings
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.setup import settle
from distflow_jax.sizes import derive_sizes
from distflow_jax.training.balance import balanced
from distflow_jax.training.config import TrainingConfig
from distflow_jax.training.forward import ForwardConfig, response_logp
from distflow_jax.training.objectives.sft import SftBatch, sft_objective
from distflow_jax.training.update import UpdateShape, accumulate_gradients
from distflow_jax.types import ROUTED_EXPERTS, flatten_dict

MOE = dataclasses.replace(
    TINY, family="qwen3_moe", qk_norm=True, mlp_size=32, num_experts=8, experts_per_token=3
)
COLUMN = TokenColumn((MOE.num_layers, MOE.experts_per_token), "int8", prompt=True, fill=-1)
PARAMS = random_params(MOE)
SAMPLES = random_samples(0, groups=3, size=3)
FORWARD = ForwardConfig(logp_chunk=16, remat="none")
SHAPE = RowShape(1, 4, 128, 8)
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "own prompts"])


def some_experts(rng, tokens):
    """Any of them, [tokens, layers, K]; of every eighth token none are known."""
    noise = rng.random((tokens, MOE.num_layers, MOE.num_experts))
    chosen = np.argsort(noise, -1)[..., : MOE.experts_per_token].astype(np.int8)
    return np.where(rng.random((tokens, 1, 1)) < 1 / 8, np.int8(-1), chosen)


def recorded_of(samples):
    """Of each sample, alike in all copies of a prompt; of the last token none are known."""
    found = []
    for prompt, sample, response in zip(
        samples.prompt, samples.sample, samples.response, strict=True
    ):
        of_prompt = some_experts(np.random.default_rng(prompt.counter), len(prompt.tokens))
        rng = np.random.default_rng((prompt.counter, int(sample)))
        own = some_experts(rng, len(response))
        own[-1] = -1
        found.append(np.concatenate([of_prompt, own]))
    return found


RECORDED = recorded_of(SAMPLES)


@functools.cache
def wanted():
    """What each sample gives through the recorded experts."""
    return [
        exact(MOE, PARAMS, np.concatenate([prompt.tokens, response]), recorded)
        for prompt, response, recorded in zip(
            SAMPLES.prompt, SAMPLES.response, RECORDED, strict=True
        )
    ]


def packed_rows(shared, recorded, *, ranks=1):
    rows, placement = rows_of(SAMPLES, SHAPE, shared=shared, ranks=ranks)
    assert shared == bool((rows.parent > SHAPE.sequences).any())
    if recorded is not None:
        experts = token_field(sequences_of(SAMPLES), placement, recorded, COLUMN)
        assert experts.dtype == np.int8 and (experts[rows.segment == 0] == -1).all()
        rows = dataclasses.replace(rows, experts=experts)
    return rows, placement


@jax.jit
def logp_of(params, rows):
    return response_logp(params, MOE, rows, jnp.float32(1), FORWARD)[0]


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
        exact(MOE, PARAMS, np.concatenate([p.tokens, r])).own.astype(np.int8)
        for p, r in zip(SAMPLES.prompt, SAMPLES.response, strict=True)
    ]
    found, plain = (logp_of_samples(True, recorded) for recorded in (own, None))
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@functools.partial(jax.jit, static_argnames=("mesh", "micro", "remat"))
def run(params, rows, *, mesh, micro=2, remat="none"):
    objective = sft_objective(MOE, dataclasses.replace(FORWARD, remat=remat))
    with use_mesh(mesh):
        return accumulate_gradients(
            params,
            SftBatch(rows),
            jnp.float32(1),
            shape=UpdateShape(mesh, micro, 14),
            objective=balanced(objective, 0.7),
        )


@functools.cache
def losses(shared):
    """(gradient, metrics) on one device."""
    rows, _ = packed_rows(shared, RECORDED)
    return jax.device_get(run(PARAMS, mini_batch(rows), mesh=mesh_of(1, 1)))


def assert_same(got, want):
    (grads, metrics), (others, more) = got, want
    assert metrics.keys() == more.keys()
    for name, value in more.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    a, b = ({k: np.float64(x) for k, x in flatten_dict(g).items()} for g in (grads, others))
    gap = sum(np.sum((a[k] - b[k]) ** 2) for k in b)
    assert np.sqrt(gap / sum(np.sum(x**2) for x in b.values())) < 1e-5
    return b


def test_shared_prompts_give_what_own_prompts_give():
    grads = assert_same(losses(True), losses(False))
    assert np.abs(grads["layers/router"]).max() > 1e-3  # it weighs what it did not choose


def test_the_share_of_what_routers_would_have_sent_elsewhere():
    """And the load is that of the experts which tokens went through."""
    differs, load = [], np.zeros((MOE.num_layers, MOE.num_experts))
    nll, learned = 0.0, 0
    for i, of_sample in enumerate(wanted()):
        known = RECORDED[i][..., 0] >= 0
        went = np.where(known[..., None], RECORDED[i], of_sample.own)
        differs += (~same_sets(went, of_sample.own))[known].tolist()
        for layer in range(MOE.num_layers):
            load[layer] += np.bincount(went[:, layer].reshape(-1), minlength=MOE.num_experts)
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
    params = jax.device_put(PARAMS, param_shardings(MOE, mesh))
    got = jax.device_get(run(params, mini_batch(rows), mesh=mesh, micro=1, remat="full"))
    assert_same(got, losses(True))


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
    with pytest.raises(ValueError, match="router_replay=True is for a mixture .* use False"):
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
        ("reward_model", "'reward_model': .*router_replay=True is for a policy, and none is tr"),
    ],
)
def test_responses_that_nobody_recorded(dag, message):
    with pytest.raises(ValueError, match=message):
        settle(dataclasses.replace(REPLAY, dag=dag))
