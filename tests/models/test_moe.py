"""Mixtures of experts: what each token gets is the float64 sum over its experts, on any mesh."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.family_models import CASES
from support.model_files import hf_settings, tensors_of, write_hf
from support.model_files import random_params as file_params
from support.tiny_model import MIXTURE, TINY, mesh_of, random_params

from distflow_jax.config.run_config import Config
from distflow_jax.config.training_config import LoraConfig, TrainingConfig
from distflow_jax.models import moe
from distflow_jax.models.decoder_config import DecoderConfig, adapted
from distflow_jax.models.grouped_matmul import block_size, grouped_product
from distflow_jax.models.int8 import Int8, quantise
from distflow_jax.models.matmul_layouts import Turned
from distflow_jax.models.moe import best, chosen_probability, mixture
from distflow_jax.models.parameters import num_active_params, num_params, param_shardings
from distflow_jax.models.sampler_layout import SamplerLayout
from distflow_jax.models.weights.source import FAMILIES, open_model
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import derive_sizes

WAYS = pytest.mark.parametrize("by", ["blocks", "ragged_dot"])
SIZES = {
    "all": [5, 40, 0, 11, 1, 0],
    "one group": [0, 0, 57, 0, 0, 0],
    "few rows": [1, 0, 0, 2, 0, 0],
    "one row": [0, 0, 0, 0, 0, 1],
    "long groups": [700, 0, 13, 255, 256, 257],
}


# -- products --------------------------------------------------------------------------------------


def group_of_rows(sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


@WAYS
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", SIZES)
def test_rows_meet_the_matrix_of_their_group(case, turned, by):
    """Values and both gradients against float64."""
    sizes = SIZES[case]
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(sum(sizes), 6)), rng.normal(size=(len(sizes), 6, 5))
    ct, group = rng.normal(size=(len(x), 5)), group_of_rows(sizes)
    want = np.einsum("mi,mio->mo", x, weight[group])
    d_x = np.einsum("mo,mio->mi", ct, weight[group])
    d_weight = np.zeros_like(weight)
    np.add.at(d_weight, group, x[:, :, None] * ct[:, None])
    if turned:
        weight, d_weight = weight.swapaxes(1, 2), d_weight.swapaxes(1, 2)
    x, weight, ct = (jnp.asarray(a, jnp.float32) for a in (x, weight, ct))

    @jax.jit
    def run(x, weight, ct):
        product = functools.partial(
            grouped_product, sizes=jnp.array(sizes, jnp.int32), turned=turned, by=by
        )
        y, transpose = jax.vjp(product, x, weight)
        return y, *transpose(ct)

    for got, wanted in zip(run(x, weight, ct), (want, d_x, d_weight), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@WAYS
@pytest.mark.parametrize("turned", [False, True])
def test_int8_matrices(turned, by):
    """The same as the matrices that they stand for."""
    sizes = SIZES["all"]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(sum(sizes), 6)), jnp.float32)
    shape = (len(sizes), 5, 6) if turned else (len(sizes), 6, 5)
    weight = Int8(*quantise(jnp.asarray(rng.normal(size=shape)), (2 if turned else 1,)))
    scale = jnp.expand_dims(weight.scale, 2 if turned else 1)
    whole = weight.values.astype(jnp.float32) * scale
    got, want = (
        jax.jit(functools.partial(grouped_product, turned=turned, by=by))(
            x, w, jnp.array(sizes, jnp.int32)
        )
        for w in (weight, whole)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_a_tpu_has_an_instruction_for_it(turned):
    """Both gradients too; lowered only, which needs no TPU."""
    x, sizes = jnp.ones((32, 6), jnp.float32), jnp.array([20, 12], jnp.int32)
    weight = jnp.ones((2, 5, 6) if turned else (2, 6, 5), jnp.float32)

    def loss(x, weight, by):
        return jnp.square(grouped_product(x, weight, sizes, turned, by)).sum()

    for by, count in (("ragged_dot", 3), ("blocks", 0)):
        gradient = jax.jit(jax.grad(functools.partial(loss, by=by), argnums=(0, 1)))
        lowered = gradient.trace(x, weight).lower(lowering_platforms=("tpu",))
        lines = lowered.as_text().splitlines()
        assert sum("ragged_dot" in line for line in lines) == count


@pytest.mark.parametrize(
    ("rows", "groups", "size"),
    [(1, 8, 1), (12, 8, 12), (100, 8, 16), (512, 8, 64), (10**6, 8, 256), (10**5, 128, 256)],
)
def test_rows_of_a_block(rows, groups, size):
    assert block_size(rows, groups) == size


# -- the mixture -----------------------------------------------------------------------------------


def expected(h, w, count, norm_topk):
    """In float64, token by token and expert by expert: [B, T, D]."""
    w = {name: np.asarray(value, np.float64) for name, value in w.items()}
    out = np.zeros(h.shape)
    for place in np.ndindex(h.shape[:2]):
        x = h[place].astype(np.float64)
        p = np.exp(x @ w["router"])
        p /= p.sum()
        chosen = np.argsort(-p)[:count]
        scale = p[chosen].sum() if norm_topk else 1.0
        for e in chosen:
            gate = x @ w["gate"][e]
            inner = gate / (1 + np.exp(-gate)) * (x @ w["up"][e])
            out[place] += p[e] / scale * (inner @ w["down"][e])
    return out


def layer_of(params, layer=0):
    names = ("router", "gate", "up", "down")
    return {name: params["layers"][name][layer] for name in names}


@pytest.mark.parametrize(
    ("axes", "count", "norm_topk", "ragged"),
    [
        *(
            (axes, *choice, False)
            for axes in ((1, 1, 1), (2, 4, 1))
            for choice in ((1, False), (3, True), (8, False))
        ),
        ((1, 2, 4), 3, True, False),
        ((1, 2, 4), 3, True, True),
    ],
)
def test_every_token_is_the_sum_over_its_experts(axes, count, norm_topk, ragged, monkeypatch):
    """The last mesh has two experts on each pair of devices, to which all tokens go."""
    if ragged:
        monkeypatch.setattr(moe, "platform", lambda: "tpu")
    config = dataclasses.replace(MIXTURE, experts_per_token=count)
    fsdp, tensor, expert = axes
    params, mesh = random_params(config), mesh_of(fsdp, tensor, expert=expert)
    h = np.random.default_rng(1).normal(size=(4, 9, config.hidden_size)).astype(np.float32)
    placed = jax.device_put(params, param_shardings(config, mesh))

    @jax.jit
    def run(params, h):
        with use_mesh(mesh):
            w = layer_of(params)
            return mixture(h, w, count, norm_topk=norm_topk, turned=False)[0]

    want = expected(h, layer_of(params), count, norm_topk)
    np.testing.assert_allclose(run(placed, h), want, rtol=1e-4, atol=1e-4)
    assert want.std() > 0.1


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("weights", ["apart", "turned, few tokens", "turned, many tokens"])
def test_a_samplers_layers(weights, dtype, monkeypatch):
    """On 2 x 2 devices, of which each pair has half of every expert; routers are never rounded."""
    turned, few = weights.startswith("turned"), weights.endswith("few tokens")
    monkeypatch.setattr(moe, "FEW_TOKENS", 4 if few else 3)
    params = random_params(MIXTURE)
    mesh = mesh_of(2, 2, names=("data", "tensor"))
    placed = jax.device_put(params, param_shardings(MIXTURE, mesh))
    layout = SamplerLayout(MIXTURE, "cpu", weights.split(",")[0], dtype)
    kept = layout.convert_placed(placed)["layers"]
    kept = jax.tree.map(lambda x: x[1], kept) if turned else kept[1]
    np.testing.assert_array_equal(kept["router"], params["layers"]["router"][1])
    own = layer_of(params, 1)
    for name in ("gate", "up", "down"):
        marked = turned and name != "down"
        assert isinstance(kept[name], Turned) == marked
        held = kept[name].weight if marked else kept[name]
        values, axis = held, 2 if marked or not turned else 1  # of the inputs
        if dtype == "int8":
            values = np.asarray(held.values, np.float64) * np.expand_dims(held.scale, axis)
            own[name] = values if axis == 1 else values.swapaxes(1, 2)
    size = MIXTURE.hidden_size, MIXTURE.mlp_size // 2
    shard = jax.tree.leaves(kept["down"])[0].addressable_shards[0].data
    assert shard.shape == (8, *(reversed(size) if turned else size))
    h = np.random.default_rng(1).normal(size=(4, 2, MIXTURE.hidden_size)).astype(np.float32)

    @jax.jit
    def run(w, h):
        with use_mesh(mesh):
            return mixture(h, w, 3, norm_topk=True, turned=not turned)[0]

    np.testing.assert_allclose(run(kept, h), expected(h, own, 3, True), rtol=1e-4, atol=1e-4)
    text = run.lower(kept, h).as_text()
    assert ("sort" in text) == (not few)  # few tokens pass through every expert


def test_an_expert_that_no_token_chose_may_overflow():
    h = np.random.default_rng(1).normal(size=(2, 1, MIXTURE.hidden_size)).astype(np.float32)
    w = layer_of(random_params(MIXTURE))
    chosen = jnp.array([[[0, 1, 2]]] * 2, jnp.int32)
    weight = jnp.full((2, 1, 3), 1 / 3, jnp.float32)

    def run(gate):
        matrices = moe.ExpertMatrices(gate.swapaxes(1, 2), w["up"].swapaxes(1, 2), w["down"])
        return jax.jit(moe.every_expert)(h, weight, chosen, matrices)

    large = np.where(np.arange(8)[:, None, None] < 3, w["gate"], np.float32(1e38))
    np.testing.assert_array_equal(run(large), run(w["gate"]))


def test_the_best_experts_and_their_weights():
    p = jnp.array([[[0.1, 0.3, 0.2, 0.3, 0.1]]])
    expert = best(p, 3)
    np.testing.assert_array_equal(expert, [[[1, 3, 2]]])  # of equals the first
    np.testing.assert_allclose(
        chosen_probability(p, expert, norm_topk=False)[0, 0], [0.3, 0.3, 0.2], rtol=1e-6
    )
    np.testing.assert_allclose(
        chosen_probability(p, expert, norm_topk=True)[0, 0], [3 / 8, 3 / 8, 2 / 8], rtol=1e-6
    )


def test_a_route_chooses_and_the_router_weighs():
    params = random_params(MIXTURE)
    h = np.random.default_rng(1).normal(size=(2, 5, MIXTURE.hidden_size)).astype(np.float32)
    w = layer_of(params)
    fixed = jnp.array([[[2, 0, 5]]], jnp.int32)

    @jax.jit
    def run(h, w):
        def route(probability, extra):
            return jnp.broadcast_to(extra, (2, 5, 3)), probability

        layer = functools.partial(mixture, h, w, 3, norm_topk=True, turned=False)
        return layer()[0], *layer(route=route, extra=fixed)

    plain, out, probability = run(h, w)
    assert probability.shape == (2, 5, 8)
    p = np.asarray(probability, np.float64)[..., [2, 0, 5]]
    alone = {
        e: expected(h, {k: v[..., [e]] if k == "router" else v[[e]] for k, v in w.items()}, 1, True)
        for e in (2, 0, 5)
    }
    want = sum(p[..., [i]] / p.sum(-1, keepdims=True) * alone[e] for i, e in enumerate(alone))
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
    assert np.abs(out - plain).max() > 0.1


# -- config ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "active", "message"),
    [(0, 2, "use 0 without num_experts"), (4, 0, "use 1 to 4"), (4, 5, "=5 .*=4 .*use 1 to 4")],
)
def test_impossible_numbers_of_experts(experts, active, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(num_experts=experts, experts_per_token=active)


def test_experts_have_no_adapters():
    with pytest.raises(ValueError, match=r"no adapters \(gate, up, down\); use query,key,value,o"):
        adapted(MIXTURE, LoraConfig(rank=4))
    network = adapted(MIXTURE, LoraConfig(4, targets=("query", "output")))
    assert num_active_params(network) - num_active_params(MIXTURE) > 0


def test_parameters_that_a_token_meets():
    expert = 3 * MIXTURE.hidden_size * MIXTURE.mlp_size
    assert num_params(MIXTURE) - num_active_params(MIXTURE) == MIXTURE.num_layers * 5 * expert
    assert num_active_params(TINY) == num_params(TINY)


def test_a_balance_loss_needs_experts():
    machine, config = Machine(1, 1, 1, "cpu"), Config(training=TrainingConfig(balance_coef=1e-3))
    with pytest.raises(
        ValueError, match=r"balance_coef=0.001 is for a mixture of experts, .* use 0"
    ):
        derive_sizes(config, DecoderConfig(), machine)


MIXTURES = pytest.mark.parametrize("case", ["qwen3_moe untied", "mixtral untied"])


@MIXTURES
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 9}, "experts_per_token=9 of num_experts=8"),
    ],
)
def test_other_mixtures_are_refused(case, change, message):
    config = CASES[case]
    settings = hf_settings(config) | change
    settings = {key: value for key, value in settings.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        FAMILIES[config.family].config_from_hf(settings)


@pytest.mark.parametrize(("key", "value"), [("decoder_sparse_step", 2), ("mlp_only_layers", [0])])
def test_layers_without_experts_are_refused(key, value):
    settings = hf_settings(CASES["qwen3_moe untied"]) | {key: value}
    with pytest.raises(ValueError, match=f"{key}=.* is not"):
        FAMILIES["qwen3_moe"].config_from_hf(settings)


def test_what_files_may_leave_out():
    """Defaults are transformers'."""
    config = CASES["mixtral untied"]
    settings = hf_settings(config) | {"sliding_window": config.max_position}
    del settings["rope_theta"], settings["rms_norm_eps"], settings["num_experts"]
    read = FAMILIES["mixtral"].config_from_hf(settings | {"num_local_experts": 8})
    assert read == dataclasses.replace(config, rope_theta=1e6, norm_eps=1e-5)
    config = CASES["qwen3_moe untied"]
    settings = hf_settings(config)
    del settings["norm_topk_prob"]
    read = FAMILIES["qwen3_moe"].config_from_hf(settings)
    assert read == dataclasses.replace(config, norm_topk=False)


def test_what_files_cannot_say():
    for config, message in (
        (dataclasses.replace(CASES["mixtral untied"], norm_topk=False), "norm_topk=False has no"),
        (dataclasses.replace(TINY, family="qwen3_moe", qk_norm=True), "num_experts=0 has no form"),
        (dataclasses.replace(MIXTURE, family="qwen3"), "num_experts=8 has no form"),
    ):
        with pytest.raises(ValueError, match=message):
            FAMILIES[config.family].config_to_hf(config)


def test_missing_experts_are_named(tmp_path):
    config = dataclasses.replace(CASES["mixtral untied"], vocab_size=300)
    tensors = tensors_of(config, file_params(config))
    name = "model.layers.1.block_sparse_moe.experts.7.w3.weight"
    assert tensors.pop(name).shape == (24, 32)
    folder = write_hf(tmp_path / "m", config, tensors)
    with pytest.raises(ValueError, match=rf"tensor: layers/up \[2, 8, 32, 24\] needs {name}"):
        open_model(str(folder))
    assert "num_experts" in json.loads((folder / "config.json").read_text())


def test_random_mixtures():
    for family in ("qwen3_moe", "mixtral"):
        config = open_model(f"random:{family}?experts=4&active=1&norm_topk=1").config
        assert (config.num_experts, config.experts_per_token) == (4, 1)
        assert config.qk_norm == (family == "qwen3_moe")
        assert open_model(f"random:{family}").config.num_experts == 8
