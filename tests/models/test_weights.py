"""Model sources: the same weights from every format, and what a source must not get away with."""

import json
import pickle
from dataclasses import replace

import gguf
import ml_dtypes
import numpy as np
import pytest
from support.model_files import (
    SIZES,
    assert_params,
    hf_settings,
    random_params,
    tensors_of,
    write_gguf,
    write_hf,
)

from distflow_jax.models.decoder_config import DecoderConfig, Llama3Scaling
from distflow_jax.models.families import llama
from distflow_jax.models.families.gguf_config import rope_divisors
from distflow_jax.models.weights.gguf_file import open_gguf
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder
from distflow_jax.models.weights.source import open_model

TIED = DecoderConfig(**SIZES, max_position=128)
UNTIED = DecoderConfig(**SIZES, max_position=128, tie_embeddings=False)
QWEN2 = replace(UNTIED, family="qwen2", attention_bias=True)
QWEN3 = replace(TIED, family="qwen3", qk_norm=True, head_dim=16)
EXPERTS = dict(mlp_size=24, num_experts=4, experts_per_token=2)
QWEN3_MOE = replace(QWEN3, family="qwen3_moe", **EXPERTS)
MIXTRAL = replace(UNTIED, family="mixtral", rope_theta=1e6, **EXPERTS)
NAMES = ["tied", "untied", "qwen2", "qwen3", "qwen3_moe"]
GGUF_MODELS = [TIED, UNTIED, QWEN2, QWEN3, QWEN3_MOE]
IN_GGUF = pytest.mark.parametrize("config", GGUF_MODELS, ids=NAMES)
MODELS = pytest.mark.parametrize("config", [*GGUF_MODELS, MIXTRAL], ids=[*NAMES, "mixtral"])


@pytest.mark.parametrize("shards", [1, 3])
@MODELS
def test_safetensors_give_back_what_was_saved(tmp_path, config, shards):
    params = random_params(config)
    source = open_model(str(write_hf(tmp_path / "m", config, tensors_of(config, params), shards)))
    assert source.config == config
    assert_params(source, params)
    # once more from the same source: the stream can be started again
    assert_params(pickle.loads(pickle.dumps(source)), params)


@IN_GGUF
def test_gguf_gives_back_what_was_saved(tmp_path, config):
    params = random_params(config)
    # no .gguf in the name: the content tells the format
    path = write_gguf(tmp_path / "weights.bin", config, tensors_of(config, params, "gguf"))
    for spec in (path, tmp_path):
        source = open_model(str(spec))
        assert source.config == config
        assert_params(source, params)


def test_gguf_query_rows_are_interleaved_halves(tmp_path):
    """llama.cpp rotates neighbours: its rows 0, 1, 2 are Hugging Face's 0, H/2, 1."""
    table = {weight.path: weight for weight in llama.gguf_weights(TIED)}
    rows = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    loaded = table["layers/query"].load(rows)  # [hidden, heads, head_dim]
    np.testing.assert_array_equal(loaded[:, 1, 0], rows[8])
    np.testing.assert_array_equal(loaded[:, 1, 4], rows[9])
    np.testing.assert_array_equal(loaded[:, 1, 1], rows[10])


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16"])
def test_quantised_gguf_is_what_the_package_dequantises(tmp_path, quant):
    kind = gguf.GGMLQuantizationType[quant]
    tensors = tensors_of(TIED, random_params(TIED), "gguf")
    path = write_gguf(tmp_path / "m", TIED, tensors, quant=kind)
    expected = tensors | {
        name: gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
        for name, tensor in tensors.items()
        if tensor.ndim == 2
    }
    file = open_gguf(path)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(file.read(name), tensor)
    assert_params(open_model(str(path)), random_params(TIED), atol=0.5)


@IN_GGUF
def test_gguf_goes_out_as_hugging_face_and_comes_back(tmp_path, config):
    quant = gguf.GGMLQuantizationType.Q8_0
    tensors = tensors_of(config, random_params(config), "gguf")
    source = open_model(str(write_gguf(tmp_path / "m", config, tensors, quant=quant)))
    export = Export(source.config, source.tokenizer, source.params, source.tokenizer_folder)
    write_hf_folder(tmp_path / "out", export, max_shard_bytes=10_000)
    again = open_model(str(tmp_path / "out"))
    assert again.config == source.config
    assert_params(again, dict(source.params()))
    text = "ab 12<|im_end|> Ω"
    np.testing.assert_array_equal(again.tokenizer.encode(text), source.tokenizer.encode(text))
    assert again.tokenizer.stop_ids == source.tokenizer.stop_ids


def test_gguf_header_equals_the_packages_own_reader(tmp_path):
    tensors = tensors_of(TIED, random_params(TIED), "gguf")
    path = write_gguf(tmp_path / "m", TIED, tensors, some__list=[1, 2, 3], some__number=0.5)
    ours, theirs = open_gguf(path), gguf.GGUFReader(str(path))
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.fields[name] == field.contents(), name
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files_and_targets(tmp_path, dtype):
    params = {path: array.astype(dtype) for path, array in random_params(TIED).items()}
    source = open_model(str(write_hf(tmp_path / "m", TIED, tensors_of(TIED, params))))
    for path, array in source.params(dtype):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, params[path])
    assert_params(source, {path: array.astype(np.float32) for path, array in params.items()})


def test_default_model_is_complete(smollm2):
    shapes = {path: array.shape for path, array in smollm2.params()}
    table = llama.hf_weights(smollm2.config)
    assert shapes == {weight.path: weight.param_shape(30) for weight in table}
    assert (smollm2.config.rope_theta, smollm2.config.norm_eps) == (1e5, 1e-5)
    assert smollm2.config.tie_embeddings


def test_duplicates_and_buffers_are_allowed(tmp_path):
    params = random_params(TIED)
    tensors = tensors_of(TIED, params)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert_params(open_model(str(write_hf(tmp_path / "m", TIED, tensors))), params)


MISFITS = {
    "missing": (
        lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
        r"tensor: layers/up \[2, 32, 64\] needs model.layers.1.mlp.up_proj.weight \[64, 32\]",
    ),
    "extra": (
        lambda t: t.update({"model.layers.0.extra.weight": np.ones((3, 2), np.float32)}),
        r"tensors without a parameter: model.layers.0.extra.weight \[3, 2\]",
    ),
    "more layers": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": np.ones(32, np.float32)}),
        r"tensors without a parameter: model.layers.2.input_layernorm.weight",
    ),
    "shape": (
        lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": np.ones((8, 32), "f4")}),
        r"k_proj.weight \[8, 32\] does not fit layers/key \[2, 32, 2, 8\], which needs \[16, 32\]",
    ),
    "bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
        "this family has no such biases",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit_name_both_sides(tmp_path, case):
    change, message = MISFITS[case]
    tensors = tensors_of(TIED, random_params(TIED))
    change(tensors)
    with pytest.raises(ValueError, match=message):
        open_model(str(write_hf(tmp_path / "m", TIED, tensors)))


def test_types_of_weights_are_checked_when_a_model_is_opened(tmp_path):
    """Not when they are read, after everything is compiled."""
    tensors = tensors_of(TIED, random_params(TIED))
    tensors = {name: tensor.astype(np.int8) for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match="has dtype I8, supported are BF16, F16, F32, F64: conv"):
        open_model(str(write_hf(tmp_path / "m", TIED, tensors)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_when_they_are_read(tmp_path, value):
    tensors = tensors_of(TIED, random_params(TIED))
    tensors["model.norm.weight"][3] = value
    source = open_model(str(write_hf(tmp_path / "m", TIED, tensors)))
    with pytest.raises(ValueError, match="model.norm.weight of the model holds NaN or infinity"):
        dict(source.params())


def test_gguf_names_are_checked_too(tmp_path):
    tensors = tensors_of(TIED, random_params(TIED), "gguf")
    tensors["blk.0.attn_q.bias"] = np.ones(32, np.float32)
    with pytest.raises(ValueError, match="blk.0.attn_q.bias .*no such biases"):
        open_model(str(write_gguf(tmp_path / "bias", TIED, tensors)))
    del tensors["blk.0.attn_q.bias"], tensors["blk.1.ffn_down.weight"]
    with pytest.raises(ValueError, match="layers/down .* needs blk.1.ffn_down.weight"):
        open_model(str(write_gguf(tmp_path / "short", TIED, tensors)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "family 'lama' is not supported: did you mean 'llama'"),
        ({"model_type": "bert"}, "family 'bert' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaling .* lacks low_freq"),
        ({"quantization_config": {"bits": 4}}, "quantised Hugging Face weights"),
        ({"num_key_value_heads": 3}, "_heads=4 is not divisible by num_key_value_heads=3: take"),
        ({"eos_token_id": 5000}, "the end token 5000 .eos_token_id. is none of the model's 300"),
    ],
)
def test_unsupported_networks_are_refused(tmp_path, change, message):
    tensors = tensors_of(TIED, random_params(TIED))
    with pytest.raises(ValueError, match=message):
        open_model(str(write_hf(tmp_path / "m", TIED, tensors, **change)))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__rope__scaling__type": "linear"}, "rope scaling 'linear'"),
        ({"llama__expert_count": 8}, "llama.expert_count=8 is not supported"),
        ({"llama__rope__dimension_count": 4}, "dimension_count 4 other than the head dim 8"),
        ({"llama__attention__key_length": 16}, "attn_q.weight .32, 32. does not fit"),
        ({"split__count": 2}, "one of 2 shards"),
    ],
)
def test_unsupported_gguf_is_refused(tmp_path, metadata, message):
    tensors = tensors_of(TIED, random_params(TIED), "gguf")
    with pytest.raises(ValueError, match=message):
        open_model(str(write_gguf(tmp_path / "m", TIED, tensors, **metadata)))


def test_gguf_of_another_architecture_is_refused(tmp_path):
    tensors = tensors_of(TIED, random_params(TIED), "gguf")
    with pytest.raises(
        ValueError, match="family 'gpt2' is not supported: known: llama, qwen2, qwen3"
    ):
        open_model(str(write_gguf(tmp_path / "m", TIED, tensors, arch="gpt2")))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_from_hugging_face(key):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = llama.config_from_hf(hf_settings(TIED, rope_theta=500_000.0, **{key: rope}))
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)


def test_llama3_scaling_from_gguf(tmp_path):
    scaling = Llama3Scaling(factor=32.0)
    config = DecoderConfig(**SIZES | {"head_dim": 64}, rope_theta=500_000.0, rope_scaling=scaling)
    tensors = tensors_of(config, random_params(config), "gguf")
    divisors = rope_divisors(scaling, config.rope_theta, 32).astype(np.float32)
    assert divisors.min() == 1 and divisors.max() == 32 and len(np.unique(divisors)) > 2
    path = write_gguf(tmp_path / "a", config, tensors | {"rope_freqs.weight": divisors})
    assert open_model(str(path)).config == config
    divisors[20] += 1
    path = write_gguf(tmp_path / "b", config, tensors | {"rope_freqs.weight": divisors})
    with pytest.raises(ValueError, match="rope_freqs.weight does not hold the divisors"):
        open_model(str(path))


def test_incomplete_shards_are_named(tmp_path):
    folder = write_hf(tmp_path / "m", TIED, tensors_of(TIED, random_params(TIED)), shards=3)
    index = folder / "model.safetensors.index.json"
    intact = index.read_text()
    lying = json.loads(intact)
    lying["weight_map"]["made.up"] = lying["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(lying))
    with pytest.raises(ValueError, match="lists 'made.up' in .* which does not have it"):
        open_model(str(folder))
    index.write_text(intact)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lists model-00002-of-00003.safetensors"):
        open_model(str(folder))


def test_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    small = DecoderConfig(**SIZES | {"vocab_size": 100})
    folder = write_hf(tmp_path / "m", TIED, tensors_of(small, random_params(small)))
    (folder / "config.json").write_text(json.dumps(hf_settings(small)))
    with pytest.raises(ValueError, match="tokenizer has 259 ids, the model's vocab_size is 100"):
        open_model(str(folder))
