"""The families: logits as transformers has them, config.json there and back, what is refused."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from support.family_models import CASES, TOKENS, drawn_params
from support.model_files import hf_settings, tensors_of, write_gguf, write_hf
from support.paths import TESTS
from support.tiny_model import mesh_of

from distflow_jax.models.attention import causal_attention
from distflow_jax.models.decoder_config import DecoderConfig, Llama3Scaling
from distflow_jax.models.int8 import Int8
from distflow_jax.models.matmul_layouts import Turned
from distflow_jax.models.parameters import init_params, param_shardings, param_specs, place_params
from distflow_jax.models.sampler_layout import SamplerLayout
from distflow_jax.models.transformer import head_logits, hidden_states
from distflow_jax.models.weights.source import FAMILIES, open_model
from distflow_jax.parallel.rules import use_mesh

GOLDEN = json.loads((TESTS / "golden" / "families.json").read_text())
EACH = pytest.mark.parametrize("case", CASES)
QWENS = pytest.mark.parametrize("case", ["qwen2 untied", "qwen3 tied"])


def states(config, params, **how):
    """[T, D] of the golden tokens."""
    tokens, place = jnp.asarray(TOKENS)[None], jnp.arange(len(TOKENS), dtype=jnp.int32)[None]

    def attend(q, k, v, _, *window):
        return causal_attention(q, k, v, *window), None

    return hidden_states(config, params, tokens, place, attend, **how)[0][0]


def logits_of(config, params, mesh):
    """[T, V] of the golden tokens, in one forward pass."""

    @jax.jit
    def run(params):
        with use_mesh(mesh):
            return head_logits(config, params, states(config, params))

    return np.asarray(run(params))


def assert_golden(case, logits):
    """1e-4 is some twenty times what two float32 implementations of two layers differ by."""
    entry = GOLDEN["entries"][case]
    wanted = np.array(entry["logits"])
    assert 1 < np.abs(wanted).max() < 20
    np.testing.assert_allclose(logits[GOLDEN["positions"]], wanted, rtol=0, atol=1e-4)
    logsumexp = jax.nn.logsumexp(jnp.asarray(logits), axis=-1)
    np.testing.assert_allclose(logsumexp, entry["logsumexp"], rtol=0, atol=1e-4)


@EACH
def test_logits_are_those_of_transformers(case):
    config, mesh = CASES[case], mesh_of(1, 1)
    layout = param_shardings(config, mesh)
    assert_golden(case, logits_of(config, place_params(config, drawn_params(config), layout), mesh))


@pytest.mark.parametrize("case", ["qwen2 untied", "qwen3 tied", "gemma3 tied"])
@pytest.mark.parametrize("weights", ["stacked", "turned", "apart"])
def test_layers_and_devices_do_not_matter(case, weights):
    config, mesh = CASES[case], mesh_of(2, 2)
    params = place_params(config, drawn_params(config), param_shardings(config, mesh))
    assert_golden(
        case, logits_of(config, SamplerLayout(config, "cpu", weights).convert_placed(params), mesh)
    )


@pytest.mark.parametrize("case", ["qwen2 untied", "qwen3 untied"])
def test_gradients_by_differences_and_on_any_mesh(case):
    """Of the tokens' negative log-likelihood: whole on one device, recomputed on eight."""
    config, grads = CASES[case], {}

    def loss(params, remat):
        logits = head_logits(config, params, states(config, params, remat=remat)[:-1])
        chosen = jnp.take_along_axis(logits, jnp.asarray(TOKENS)[1:, None], axis=1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - chosen)

    for axes in ((1, 1), (4, 2)):
        mesh = mesh_of(*axes)
        params = place_params(config, drawn_params(config), param_shardings(config, mesh))

        @jax.jit
        def run(params, mesh=mesh):
            with use_mesh(mesh):
                return jax.grad(loss)(params, remat="full" if mesh.size > 1 else "none")

        grads[axes] = {
            path: np.asarray(g) for path, g in flatten_dict(run(params), sep="/").items()
        }
    one, eight = grads.values()
    norm = np.sqrt(sum(np.sum(g**2.0) for g in one.values()))
    assert np.sqrt(sum(np.sum((one[p] - eight[p]) ** 2.0) for p in one)) < 1e-5 * norm
    value = jax.jit(lambda params: loss(params, "none"))
    params = dict(drawn_params(config))
    rng = np.random.default_rng(3)
    for path in params:
        if not path.endswith(("_bias", "query_norm", "key_norm")):
            continue
        way = rng.standard_normal(params[path].shape).astype(np.float32)
        ends = [
            unflatten_dict(params | {path: params[path] + s * way}, sep="/") for s in (0.01, -0.01)
        ]
        slope = (value(ends[0]) - value(ends[1])) / 0.02
        # a key's bias turns with its position, so that it does not cancel in the softmax
        np.testing.assert_allclose(np.sum(one[path] * way), slope, rtol=0.02, atol=0.02)
        assert np.abs(one[path]).max() > 0.01, path


@EACH
@pytest.mark.parametrize("scaled", [False, True])
def test_config_json_says_what_the_config_says(case, scaled):
    config, family = CASES[case], FAMILIES[CASES[case].family]
    if scaled and not (config.sliding_window and all(config.windowed)):
        scaling = Llama3Scaling(32.0, 1.5, 5.0, 4096)
        config = replace(config, rope_scaling=scaling, rope_factor=1.0)
    settings = json.loads(json.dumps(family.config_to_hf(config)))
    named = "gemma3_text" if config.family == "gemma3" else config.family
    assert settings["model_type"] == named and len(settings["architectures"]) == 1
    assert family.config_from_hf(settings) == config


@EACH
def test_config_json_of_transformers_is_read(case):
    """Written by the version that is named in the golden file, after it had read ours."""
    assert (
        FAMILIES[CASES[case].family].config_from_hf(GOLDEN["entries"][case]["config"])
        == (CASES[case])
    )


def test_switches_that_a_family_has_not_are_not_written():
    for family, switch in (
        ("llama", "attention_bias"),
        ("llama", "qk_norm"),
        ("qwen2", "qk_norm"),
        ("qwen3", "attention_bias"),
    ):
        config = DecoderConfig(family=family, **FAMILIES[family].SWITCHES | {switch: True})
        with pytest.raises(ValueError, match=f"{family} model with {switch}=True has no form"):
            FAMILIES[family].config_to_hf(config)
    with pytest.raises(ValueError, match="qwen2 model with attention_bias=False has no form"):
        FAMILIES["qwen2"].config_to_hf(DecoderConfig(family="qwen2"))


@QWENS
def test_the_window_that_transformers_takes_where_none_is_named_is_refused(case):
    config = replace(CASES[case], max_position=8192)
    windows = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    with pytest.raises(ValueError, match="sliding_window=4096, .*max_position_embeddings to 4096"):
        FAMILIES[config.family].config_from_hf(hf_settings(config) | windows)


def test_the_heads_of_a_qwen3_that_names_none_are_as_wide_as_transformers_has_them():
    settings = hf_settings(CASES["qwen3 tied"])
    del settings["head_dim"]
    assert FAMILIES["qwen3"].config_from_hf(settings).head_dim == 128


@QWENS
def test_gguf_rows_are_not_interleaved(case):
    """llama.cpp rotates the halves of these families, as Hugging Face does."""
    config = CASES[case]
    tables = (getattr(FAMILIES[config.family], f"{kind}_weights") for kind in ("hf", "gguf"))
    hf, gguf = ({w.path: w for w in table(config)} for table in tables)
    for path in ("layers/query", "layers/key"):
        tensor = np.random.default_rng(0).normal(size=hf[path].source_shape)
        np.testing.assert_array_equal(hf[path].load(tensor), gguf[path].load(tensor))


@QWENS
def test_extra_or_missing_vectors_are_named(case, tmp_path):
    # a vocabulary that the test tokenizer fits into
    config = replace(CASES[case], vocab_size=300)
    params = dict(drawn_params(config))
    tensors = tensors_of(config, params)
    vector = "self_attn." + ("k_proj.bias" if config.attention_bias else "k_norm.weight")
    path = "layers/key_" + ("bias" if config.attention_bias else "norm")
    del tensors[f"model.layers.1.{vector}"]
    with pytest.raises(ValueError, match=f"without a tensor: {path} .*layers.1.{vector}"):
        open_model(str(write_hf(tmp_path / "short", config, tensors)))
    tensors = tensors_of(config, params) | {
        "model.layers.0.self_attn.o_proj.bias": np.ones(config.hidden_size, np.float32)
    }
    with pytest.raises(ValueError, match="o_proj.bias .*this family has no such biases"):
        open_model(str(write_hf(tmp_path / "extra", config, tensors)))
    tensors = tensors_of(config, params, "gguf")
    tensors["blk.0.attn_output.bias"] = np.ones(config.hidden_size, np.float32)
    with pytest.raises(ValueError, match="attn_output.bias .*this family has no such biases"):
        open_model(str(write_gguf(tmp_path / "extra.gguf", config, tensors)))


@QWENS
def test_random_models_have_what_the_family_has(case):
    family = CASES[case].family
    config = open_model(f"random:{family}?hidden=32&layers=2&heads=4&kv_heads=2&mlp=48").config
    assert config.family == family
    assert (config.attention_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    born = flatten_dict(init_params(config, 0, param_shardings(config, mesh_of(1, 1))), sep="/")
    for name in ("query", "key", "value"):
        if config.attention_bias:
            np.testing.assert_array_equal(born[f"layers/{name}_bias"], 0)
        elif name != "value":
            np.testing.assert_array_equal(born[f"layers/{name}_norm"], 1)


@QWENS
@pytest.mark.parametrize("weights", ["stacked", "turned", "apart"])
def test_int8_leaves_vectors_alone(case, weights):
    config, mesh = CASES[case], mesh_of(2, 2, names=("data", "tensor"))
    given = dict(drawn_params(config))
    params = place_params(config, given.items(), param_shardings(config, mesh))
    kept = SamplerLayout(config, "cpu", weights, "int8").convert_placed(params)
    for path, spec in param_specs(config).items():
        if not path.startswith("layers/"):
            continue
        name = path.removeprefix("layers/")
        for layer in range(config.num_layers):
            if weights == "apart":
                value = kept["layers"][layer][name]
            else:
                value = jax.tree.map(lambda x, layer=layer: x[layer], kept["layers"][name])
            if isinstance(value, Turned):
                (value,) = value
            assert isinstance(value, Int8) == bool(spec.inputs), path
            if not spec.inputs:
                assert name.endswith(("norm", "bias"))
                np.testing.assert_array_equal(value, given[path][layer])
