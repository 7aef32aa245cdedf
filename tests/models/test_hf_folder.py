"""A written Hugging Face folder: read back to the bit, from any number of files; all or nothing."""

import dataclasses
import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from support import seeing_models
from support.exported_folder import assert_bits, export_of, random_params, tensors_in

from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models.decoder_config import (
    DecoderConfig,
    Llama3Scaling,
    adapted,
    reward_head_stddev,
    scalar_model,
)
from distflow_jax.models.lora import is_adapter
from distflow_jax.models.parameters import param_specs
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.atomic_folder import check_new_folder, new_folder
from distflow_jax.models.weights.file_hashes import write_hashes
from distflow_jax.models.weights.hf_folder import Export, config_json, write_hf_folder
from distflow_jax.models.weights.peft_folder import Adapters, write_peft_folder
from distflow_jax.models.weights.safetensors_writer import parse_size, plan_shards
from distflow_jax.models.weights.source import open_model

TIED = DecoderConfig(
    vocab_size=300,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
    max_position=128,
)
UNTIED = dataclasses.replace(
    TIED,
    tie_embeddings=False,
    rope_theta=5e5,
    norm_eps=1e-6,
    rope_scaling=Llama3Scaling(factor=32.0),
)
MIXTURE = dataclasses.replace(
    TIED, family="qwen3_moe", qk_norm=True, num_experts=5, experts_per_token=2, norm_topk=False
)
MIXTRAL = dataclasses.replace(UNTIED, family="mixtral", num_experts=3, experts_per_token=1)
CHAT = [{"role": "user", "content": "Hi, is 12 + 35 = 47?\n"}]


@pytest.mark.parametrize(
    "config", [TIED, UNTIED, MIXTURE, MIXTRAL], ids=["tied", "untied", "qwen3_moe", "mixtral"]
)
@pytest.mark.parametrize("limit", [10**9, 20_000, 1])
def test_what_was_written_comes_back_bit_for_bit(tmp_path, config, limit):
    params = random_params(config)
    params["final_norm"][:3] = [-0.0, 1e-45, 3e38]
    written = write_hf_folder(tmp_path / "out", export_of(config, params), max_shard_bytes=limit)
    source = open_model(str(tmp_path / "out"))
    assert source.config == config
    assert_bits(dict(source.params()), params)
    assert written.num_params == sum(array.size for array in params.values())
    assert written.files == {p.name: p.stat().st_size for p in (tmp_path / "out").iterdir()}
    shards = sorted(name for name in written.files if name.endswith(".safetensors"))
    assert ("lm_head.weight" in tensors_in(tmp_path / "out")) == (not config.tie_embeddings)
    if limit == 10**9:
        assert shards == ["model.safetensors"]
        return
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == 4 * written.num_params
    for name in shards:
        tensors = safetensors.numpy.load_file(tmp_path / "out" / name)
        assert {tensor for tensor, file in index["weight_map"].items() if file == name} == set(
            tensors
        )
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit


def test_the_order_of_the_stream_does_not_matter(tmp_path):
    params = random_params(UNTIED)
    backwards = dict(reversed(params.items()))
    for name, stream in (("a", params), ("b", backwards)):
        write_hf_folder(tmp_path / name, export_of(UNTIED, stream), max_shard_bytes=20_000)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_round_to_nearest_and_count_what_they_cannot_hold(tmp_path, dtype):
    params = random_params(TIED)
    params["final_norm"][:6] = [3.4e38, -7e4, 65519.9, 1e-45, 1e-8, 0.0]
    written = write_hf_folder(tmp_path / "out", export_of(TIED, params), dtype=dtype)
    kept = tensors_in(tmp_path / "out")["model.norm.weight"]
    wanted = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(kept, params["final_norm"].astype(wanted))
    # float16 ends at 65504 and 6e-8; bfloat16 has float32's range but for its last step
    counted = (written.lost.above, written.lost.below, written.lost.not_finite)
    assert counted == {"bfloat16": (1, 1, 0), "float16": (2, 2, 0)}[dtype]
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == dtype


def test_values_that_are_not_finite_are_counted(tmp_path):
    params = random_params(TIED)
    params["final_norm"][:2] = [np.nan, np.inf]
    written = write_hf_folder(tmp_path / "out", export_of(TIED, params), dtype="bfloat16")
    assert (written.lost.above, written.lost.not_finite) == (0, 2)


def assert_same_tokenizer(one, other):
    texts = ["", " Hello,\n\n  world 1234!", "Ω你好🌍", "<|im_start|>user\nx<|im_end|>", "\t a  b"]
    for text in texts:
        np.testing.assert_array_equal(one.encode(text), other.encode(text))
        assert one.decode(one.encode(text)) == other.decode(one.encode(text))
    assert one.render(CHAT) == other.render(CHAT)
    for name in ("stop_ids", "pad_id", "bos_id", "chat_template", "special_tokens"):
        assert getattr(one, name) == getattr(other, name), name


def test_a_new_tokenizer_is_the_one_it_was(tmp_path, smollm2):
    for name, tokenizer in (("gguf", smollm2.tokenizer), ("bytes", Tokenizer.byte_level(300))):
        export = dataclasses.replace(export_of(TIED, random_params(TIED)), tokenizer=tokenizer)
        write_hf_folder(tmp_path / name, export)
        assert_same_tokenizer(Tokenizer.from_folder(tmp_path / name), tokenizer)
        ids = json.loads((tmp_path / name / "generation_config.json").read_text())["eos_token_id"]
        assert tuple(ids if isinstance(ids, list) else [ids]) == tokenizer.stop_ids
        # and to whoever reads tokenizer.json alone
        alone = tokenizers.Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        assert alone.encode("1 + 2 = 3 Ω").ids == tokenizer.encode("1 + 2 = 3 Ω").tolist()


def test_tokenizer_files_are_copied_as_they_are(tmp_path):
    params = random_params(TIED)
    write_hf_folder(tmp_path / "one", export_of(TIED, params))
    (tmp_path / "one" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "one" / "generation_config.json").write_text('{"eos_token_id": [258, 257]}')
    write_hashes(tmp_path / "one")
    source = open_model(str(tmp_path / "one"))
    again = Export(source.config, source.tokenizer, source.params, source.tokenizer_folder)
    write_hf_folder(tmp_path / "two", again)
    for path in (tmp_path / "one").iterdir():
        if path.name not in ("config.json", "SHA256SUMS"):
            assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    assert open_model(str(tmp_path / "two")).tokenizer.stop_ids == (258, 257)


def test_a_scalar_model_becomes_a_sequence_classifier(tmp_path):
    network = scalar_model(UNTIED, head_stddev=reward_head_stddev(UNTIED))
    params = random_params(network)
    write_hf_folder(tmp_path / "out", export_of(network, params))
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["architectures"] == ["LlamaForSequenceClassification"]
    assert len(settings["id2label"]) == 1  # what transformers takes the number of labels from
    assert settings["pad_token_id"] == 256
    tensors = tensors_in(tmp_path / "out")
    assert "lm_head.weight" not in tensors
    np.testing.assert_array_equal(tensors["score.weight"], params["head"][None])
    np.testing.assert_array_equal(
        tensors["model.embed_tokens.weight"], params["trunk/embed/embedding"]
    )


def test_a_classifier_does_not_take_the_end_of_a_text_for_padding(tmp_path, smollm2):
    assert smollm2.tokenizer.pad_id in smollm2.tokenizer.stop_ids
    export = export_of(scalar_model(TIED), {})
    settings = config_json(dataclasses.replace(export, tokenizer=smollm2.tokenizer), "float32")
    assert settings["pad_token_id"] is None


# -- all or nothing --------------------------------------------------------------------------------


def failing(params):
    yield from list(params.items())[:3]
    raise RuntimeError("the disk is gone")


def test_a_failure_leaves_nothing_behind(tmp_path):
    params = random_params(TIED)
    broken = dataclasses.replace(export_of(TIED, params), params=lambda: failing(params))
    with pytest.raises(RuntimeError, match="the disk is gone"):
        write_hf_folder(tmp_path / "out", broken)
    assert not list(tmp_path.iterdir())
    write_hf_folder(tmp_path / "out", export_of(TIED, params))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(RuntimeError, match="the disk is gone"):
        write_hf_folder(tmp_path / "out", broken, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_a_parameter_too_few_or_of_another_shape_is_refused(tmp_path):
    params = random_params(TIED)
    with pytest.raises(ValueError, match="tensors not written: model.norm.weight"):
        write_hf_folder(tmp_path / "out", export_of(TIED, dict(list(params.items())[:-1])))
    wide = params | {"final_norm": np.ones(33, np.float32)}
    with pytest.raises(ValueError, match="33"):
        write_hf_folder(tmp_path / "out", export_of(TIED, wide))
    assert not list(tmp_path.iterdir())


def test_overwriting_replaces_the_whole_folder(tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # an empty one is no obstacle
    write_hf_folder(out, export_of(TIED, random_params(TIED)), max_shard_bytes=20_000)
    with pytest.raises(ValueError, match="is not empty .*--overwrite"):
        write_hf_folder(out, export_of(TIED, random_params(TIED, 1)))
    write_hf_folder(out, export_of(TIED, random_params(TIED, 1)), overwrite=True)
    assert_bits(dict(open_model(str(out)).params()), random_params(TIED, 1))
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_model_is_not_overwritten(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="not a model folder .it has no config.json"):
        check_new_folder(tmp_path / "notes", overwrite=True, needed=1)
    # a run's folder has a config.json too
    (tmp_path / "notes" / "config.json").write_text("{}")
    (tmp_path / "notes" / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="not a model folder .it holds the folder checkpoints"):
        check_new_folder(tmp_path / "notes", overwrite=True, needed=1)
    with pytest.raises(ValueError, match="thesis.txt is no folder"):
        check_new_folder(tmp_path / "notes" / "thesis.txt", overwrite=True, needed=1)


def test_space_is_checked_beforehand(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(ValueError, match=r"needs 1152921504.61 GB and \d+\.\d\d GB are free at"):
        check_new_folder(tmp_path / "a/b", overwrite=False, needed=1 << 60)
    assert free > 100 << 20, "the tests need some disk"
    check_new_folder(tmp_path / "a/b", overwrite=False, needed=1 << 20)
    assert not list(tmp_path.iterdir())


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with new_folder(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk/config.json").is_file()


# -- sizes -----------------------------------------------------------------------------------------


def test_shards_are_filled_in_order():
    shapes = {"a": (3,), "b": (5,), "c": (100,), "d": (2, 2), "e": ()}
    assert plan_shards(shapes, "float32", 40) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d", "e"],
    }
    assert plan_shards(shapes, "bfloat16", 226) == {"model.safetensors": list("abcde")}


def test_sizes_are_read_as_they_are_written():
    sizes = {"5GB": 5 * 10**9, "1.5 mb": 1_500_000, "2GiB": 2 << 30, "1000": 1000}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "5 apples", "-1GB", "0", "0.1"):
        with pytest.raises(ValueError, match="write it as 5GB"):
            parse_size(text)


@pytest.mark.parametrize(
    ("case", "text", "tower"),
    [
        ("smolvlm", "model.text_model", "model.vision_model.encoder.layers.0.self_attn.q_proj"),
        ("qwen2_5_vl", "model.language_model", "model.visual.blocks.0.mlp.gate_proj"),
        ("qwen3_vl", "model.language_model", "model.visual.blocks.0.mlp.linear_fc1"),
        ("gemma3", "model.language_model", "model.vision_tower.encoder.layers.0.self_attn.q_proj"),
    ],
)
def test_adapters_beside_a_tower_have_transformers_names(tmp_path, case, text, tower):
    """PEFT only warns of names that no module has, and gives a tower adapters if these are asked
    for by the last word."""
    network = adapted(seeing_models.CASES[case], LoraConfig(2, targets=("query", "gate")))
    found = {
        path: np.zeros(spec.shape, np.float32)
        for path, spec in param_specs(network).items()
        if is_adapter(path)
    }
    write_peft_folder(tmp_path / "out", Adapters(network, "base", lambda: iter(found.items())))
    settings = json.loads((tmp_path / "out/adapter_config.json").read_text())
    modules = {
        f"{text}.layers.{layer}.{name}"
        for layer in range(network.num_layers)
        for name in ("self_attn.q_proj", "mlp.gate_proj")
    }
    tensors = safetensors.numpy.load_file(tmp_path / "out/adapter_model.safetensors")
    assert tensors.keys() == {
        f"base_model.model.{module}.lora_{which}.weight" for module in modules for which in "AB"
    }
    # as PEFT selects modules
    everything = {*modules, tower, f"{text}.layers.0.self_attn.k_proj"}
    assert {m for m in everything if re.fullmatch(settings["target_modules"], m)} == modules
