"""Gemma 3's files: what is read, what comes back, and what is refused. Logits: test_families.py."""

import dataclasses
import json

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from support.exported_folder import assert_bits, export_of, random_params, tensors_in
from support.family_models import CASES, drawn_params
from support.model_files import gemma, write_gguf
from support.rewritten import put, written
from support.tiny_model import mesh_of

from distflow_jax.models.decoder_config import DecoderConfig, scalar_model
from distflow_jax.models.families import gemma3
from distflow_jax.models.parameters import init_params, param_shardings
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.file_hashes import write_hashes
from distflow_jax.models.weights.hf_folder import write_hf_folder
from distflow_jax.models.weights.source import open_model

GEMMA = dataclasses.replace(CASES["gemma3 tied"], vocab_size=300)
# as google/gemma-3-4b-it has it, without what says nothing of the network
FILE_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_released_files_are_read():
    config = gemma3.config_from_hf(gemma())
    assert config == DecoderConfig(
        family="gemma3",
        vocab_size=262_144,
        hidden_size=1152,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        mlp_size=6912,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_position=32_768,
        sliding_window=512,
        full_every=6,
        rope_local_theta=1e4,
        **gemma3.SWITCHES,
    )
    assert [i for i, windowed in enumerate(config.windowed) if not windowed] == [5, 11, 17, 23]
    large = gemma3.config_from_hf(FILE_4B)
    assert (large.hidden_size, large.num_layers, large.num_heads) == (2560, 34, 8)
    assert (large.sliding_window, large.full_every, large.rope_factor) == (1024, 6, 8.0)
    assert (large.rope_theta, large.rope_local_theta, large.max_position) == (1e6, 1e4, 131_072)


def test_every_number_of_the_windows_comes_back():
    for changes in (
        {"full_every": 0},
        {"full_every": 6},  # more than there are layers: all have a window
        {"full_every": 1},  # none has
        {"sliding_window": 0, "full_every": 0},
        {"rope_factor": 4.0, "query_scalar": 0},
        {"num_layers": 7, "full_every": 3},
    ):
        config = dataclasses.replace(GEMMA, **changes)
        settings = json.loads(json.dumps(gemma3.config_to_hf(config)))
        read = gemma3.config_from_hf(settings)
        assert read.windowed == config.windowed
        if any(config.windowed):
            assert read == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": None}, "layers of sliding_attention and no sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types of config.json must be 26 of"),
        (
            {"layer_types": ["full_attention", *["sliding_attention"] * 25]},
            r"in every n-th layer only, .* in layers \[0\]",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear rope scaling .* lacks factor"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "'linear' in layers with a window",
        ),
    ],
)
def test_what_the_network_has_not_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        gemma3.config_from_hf(gemma(**change))


def test_two_scalings_have_no_form():
    scaled = dataclasses.replace(CASES["llama untied"].rope_scaling)
    config = dataclasses.replace(GEMMA, rope_factor=2.0, rope_scaling=scaled)
    with pytest.raises(ValueError, match="rope_factor=2.0 and Llama3Scaling.* has no form"):
        gemma3.config_to_hf(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "relu"}, "activation must be one of silu, gelu_tanh, got 'relu'"),
        ({"full_every": 6}, "full_every=6 has no effect with model sliding_window=0"),
        ({"sliding_window": -1}, "sliding_window must be an integer from 0"),
        ({"rope_factor": 0.5}, "rope_factor must be at least 1, got 0.5"),
        ({"query_scalar": 8}, "query_scalar=8 needs qk_norm"),
        (
            {"activation": "gelu_tanh", "num_experts": 4, "experts_per_token": 1},
            "experts with model activation='gelu_tanh'",
        ),
    ],
)
def test_shapes_that_are_not_possible_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**changes)


def test_what_was_written_comes_back_bit_for_bit(tmp_path):
    params = random_params(GEMMA)
    params["layers/mlp_norm"][0, :3] = [-0.0, 1e-45, 1e-9]  # lost in 1 + w
    write_hf_folder(tmp_path / "out", export_of(GEMMA, params), max_shard_bytes=20_000)
    source = open_model(str(tmp_path / "out"))
    assert source.config == GEMMA
    assert_bits(dict(source.params()), params)
    names = tensors_in(tmp_path / "out")
    for norm, path in (
        ("input", "attention_norm"),
        ("post_attention", "attention_post_norm"),
        ("pre_feedforward", "mlp_norm"),
        ("post_feedforward", "mlp_post_norm"),
    ):
        written = names[f"model.layers.2.{norm}_layernorm.weight"]
        np.testing.assert_array_equal(written, params[f"layers/{path}"][2])


@pytest.mark.parametrize("outer", ["", "model."])
def test_of_a_tower_that_config_json_does_not_name_nothing_is_dropped_in_silence(tmp_path, outer):
    tensors = written(tmp_path, GEMMA, random_params(GEMMA))
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": settings, "vision_config": {}})
    )
    tower = {f"{outer}vision_tower.vision_model.post_layernorm.weight": np.ones(3, np.float32)}
    put(tmp_path, tensors | tower)
    with pytest.raises(ValueError, match="without a parameter: .*post_layernorm.weight"):
        open_model(str(tmp_path))


def test_a_scalar_model_becomes_a_sequence_classifier(tmp_path):
    network = scalar_model(GEMMA, head_stddev=0.1)
    write_hf_folder(tmp_path / "out", export_of(network, random_params(network)))
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["architectures"] == ["Gemma3TextForSequenceClassification"]


def test_a_gguf_is_refused(tmp_path):
    llama = CASES["llama tied"]
    path = write_gguf(tmp_path / "x.gguf", dataclasses.replace(llama, vocab_size=300), {}, "gemma3")
    with pytest.raises(ValueError, match="gemma3 GGUF is not supported: use Hugging Face's files"):
        open_model(str(path))


def test_random_models():
    config = open_model("random:gemma3?hidden=32&layers=7&heads=4&mlp=48").config
    assert (config.sliding_window, config.full_every, config.rope_theta) == (512, 6, 1e6)
    config = open_model("random:gemma3?hidden=32&layers=4&heads=4&window=8&full_every=2").config
    assert config.windowed == (True, False, True, False)
    born = flatten_dict(init_params(config, 0, param_shardings(config, mesh_of(1, 1))), sep="/")
    for path, value in born.items():
        if path.endswith("norm"):
            np.testing.assert_array_equal(value, 0)  # multiplies with 1
    with pytest.raises(ValueError, match="llama with window=8 is not supported; use gemma3"):
        open_model("random:llama?window=8")


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def test_turns_of_gemma(tmp_path):
    """Its template writes <bos> itself, and a turn ends otherwise than a text."""
    backend = Tokenizer.byte_level(300).backend
    backend.add_special_tokens(["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE})
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    bos, eos, start, end = (backend.token_to_id(f"<{name}>") for name in _SPELLED)
    assert tokenizer.bos_id == bos and tokenizer.stop_ids == (eos, end)
    _, ids = tokenizer.encode_prompt([{"role": "user", "content": "1 + 1?"}])
    assert (ids == bos).sum() == 1 and ids[0] == bos and (ids == start).sum() == 2
    answer = tokenizer.encode_answer([{"role": "user", "content": "1 + 1?"}], "2")
    assert answer.tolist() == [*tokenizer.encode("2"), end]


def test_the_token_of_an_image_has_no_row_in_the_smallest_models(tmp_path):
    params = random_params(GEMMA)
    write_hf_folder(tmp_path / "small", export_of(GEMMA, params))
    backend = Tokenizer.byte_level(300).backend
    backend.add_special_tokens([f"<unused{i}>" for i in range(41)] + ["<image_soft_token>"])
    assert backend.token_to_id("<image_soft_token>") == 300
    backend.save(str(tmp_path / "small" / "tokenizer.json"))
    write_hashes(tmp_path / "small")
    tokenizer = open_model(str(tmp_path / "small")).tokenizer
    assert tokenizer.vocab_size == 300
    text = "a<unused40><image_soft_token>"
    ids = tokenizer.encode(text)
    assert ids.max() == 299 and ids[1] == 299 and len(ids) == 2 + len("<image_soft_token>")
    assert tokenizer.decode(ids, skip_special=False) == text


_SPELLED = ("bos", "eos", "start_of_turn", "end_of_turn")


def test_no_norm_is_forgotten():
    """Of the weights that the logits of test_families.py are of, none is the neutral one."""
    for path, value in drawn_params(GEMMA):
        assert np.abs(value).mean() > 0.05, path
