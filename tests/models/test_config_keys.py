"""Keys of files: what changes a network is read or refused by name, what changes nothing passes."""

import dataclasses
import functools
import json

import pytest
from support.model_files import tensors_of, write_gguf
from support.rewritten import CASES, change_config, wider, written

from distflow_jax.models.families.hf_config import check_hf_config
from distflow_jax.models.weights.source import FAMILIES, open_model

# one case of each family
EACH = {CASES[case].family: case for case in CASES if "yarn" not in case and "windows" not in case}
SEEING = [family for family, case in EACH.items() if CASES[case].vision is not None]
# keys of other networks that transformers, llama.cpp's authors or their forks have; none of ours
OF_OTHERS = {
    "mlp_bias": True,
    "use_bias": True,
    "o_proj_bias": True,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50,
    "attn_logit_softcap": 50.0,
    "logit_cap": 20.0,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.25,
    "rope_interleaved": True,
    "rope_ratio": 2.0,
    "no_rope_layers": [0, 1],
    "nope_layer_interval": 4,
    "use_rope": False,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "logit_scale": 0.0625,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "embedding_scale": 11.3,
    "mup_width_multiplier": 4.0,
    "clip_qkv": 8.0,
    "qk_layernorm": True,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attention_window": 512,
    "sliding_window_size": 128,
    "is_causal": False,
    "use_bidirectional_attention": True,
    "alibi": True,
    "position_embedding_type": "alibi",
    "use_parallel_residual": True,
    "parallel_attn": True,
    "attention_sinks": True,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "interleave_moe_layer_step": 2,
    "attn_output_gate": True,
    "mlp_activation": "relu2",
    "original_max_position_embeddings": 16,
}
# what released files and trainers leave in a config.json: other parts of a program read it
HARMLESS = {
    "_name_or_path": "somewhere/else",
    "architectures": ["SomethingForCausalLM"],
    "attention_dropout": 0.1,
    "attn_implementation": "flash_attention_2",
    "auto_map": {"AutoConfig": "configuration.Config"},
    "bos_token_id": 1,
    "cache_implementation": "hybrid",
    "chunk_size_feed_forward": 0,
    "clip_qkv": None,
    "do_sample": True,
    "dtype": "bfloat16",
    "embd_pdrop": 0.0,
    "eos_token_id": [1, 2],
    "final_logit_softcapping": None,
    "hidden_dropout": 0.1,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "is_causal": True,
    "is_llama_config": True,
    "logits_scaling": 1.0,
    "mlp_bias": False,
    "n_group": 1,
    "neftune_noise_alpha": 5,
    "no_rope_layers": [],
    "output_attentions": False,
    "output_router_logits": True,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.01,
    "temperature": 0.6,
    "top_k": 20,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"dtype": {"q4": "fp16"}},
    "transformers_version": "5.24.0",
    "unsloth_fixed": True,
    "unsloth_version": "2026.1",
    "use_cache": True,
    "use_mrope": False,
    "use_parallel_residual": False,
}


def settings_of(family, **changes):
    """config.json of the family's case, with keys of the text model changed."""
    settings = json.loads(json.dumps(FAMILIES[family].config_to_hf(CASES[EACH[family]])))
    inner = settings["text_config"] if "text_config" in settings else settings
    inner |= changes
    return settings


def read(family, settings):
    """The config; how pictures are resized stands in another file."""
    config, own = FAMILIES[family].config_from_hf(settings), CASES[EACH[family]]
    return config if own.vision is None else dataclasses.replace(config, vision=own.vision)


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("key", OF_OTHERS)
def test_a_key_that_would_change_the_network_is_refused_by_name(family, key):
    with pytest.raises(ValueError, match=f"{key}=.* is not supported") as error:
        read(family, settings_of(family, **{key: OF_OTHERS[key]}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", EACH)
def test_keys_that_change_nothing_pass(family):
    assert read(family, settings_of(family, **HARMLESS)) == CASES[EACH[family]]


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("key", ["hidden_act", "hidden_activation"])
def test_another_activation_is_refused(family, key):
    with pytest.raises(ValueError, match=f"{key}='relu' is not supported"):
        read(family, settings_of(family, **{key: "relu"}))


@pytest.mark.parametrize("family", [f for f in EACH if f != "qwen2" and f != "qwen2_5_vl"])
def test_biases_of_attention_are_refused(family):
    with pytest.raises(ValueError, match="attention_bias=True is not supported"):
        read(family, settings_of(family, attention_bias=True))


@pytest.mark.parametrize("family", EACH)
def test_norms_of_queries_and_keys_are_those_of_the_family(family):
    settings = settings_of(family, use_qk_norm=True)
    if CASES[EACH[family]].qk_norm:
        assert read(family, settings) == CASES[EACH[family]]
        return
    with pytest.raises(ValueError, match="use_qk_norm=True is not supported"):
        read(family, settings)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
@pytest.mark.parametrize("value", [True, False, None])
def test_biases_that_a_family_always_has_need_no_key(family, value):
    assert read(family, settings_of(family, attention_bias=value)) == CASES[EACH[family]]


@pytest.mark.parametrize("family", [f for f in EACH if f not in ("gemma3", "mistral")])
@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 8},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    ],
)
def test_windows_that_the_network_has_not_are_refused(family, change):
    with pytest.raises(ValueError, match="sliding_window=8"):
        read(family, settings_of(family, **change))


@pytest.mark.parametrize("family", [f for f in EACH if f not in ("gemma3", "mistral", "mixtral")])
def test_a_window_that_is_switched_off_passes(family):
    off = {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}
    assert read(family, settings_of(family, **off)) == CASES[EACH[family]]


@pytest.mark.parametrize("family", [f for f in EACH if f not in ("gemma3", "mistral")])
@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": None},
        {"sliding_window": 1 << 20, "use_sliding_window": True, "max_window_layers": None},
        {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 1 << 20},
    ],
)
def test_windows_that_limit_nothing_pass(family, change):
    assert read(family, settings_of(family, **change)) == CASES[EACH[family]]


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": False},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 28},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 3},
    ],
)
def test_mixtral_has_its_window_whatever_other_keys_say(change):
    """transformers reads sliding_window alone in this family."""
    with pytest.raises(ValueError, match="sliding_window=8, max_window_layers=0"):
        read("mixtral", settings_of("mixtral", sliding_window=8, **change))


@pytest.mark.parametrize("family", [f for f in EACH if f not in ("qwen3_moe", "mixtral")])
@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention", "mamba"])
def test_layers_of_other_types_are_refused(family, kind):
    layers = CASES[EACH[family]].num_layers
    types = [kind] + ["full_attention"] * (layers - 1)
    with pytest.raises(ValueError, match=f"layer_types of .*{kind}"):
        read(family, settings_of(family, layer_types=types))


ROPES = [
    ({"rope_type": "linear", "factor": 4.0}, "rope type 'linear'"),
    ({"type": "linear", "factor": 4.0}, "rope type 'linear'"),
    ({"rope_type": "dynamic", "factor": 4.0}, "rope type 'dynamic'"),
    ({"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, "'longrope'"),
    ({"rope_type": "proportional", "partial_rotary_factor": 0.25}, "rope type 'proportional'"),
    ({"factor": 4.0}, "factor=4.0 is not supported"),
    ({"rope_type": "default", "factor": 4.0}, "factor=4.0 is not supported"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_type": "default", "mrope_section": [1, 1, 2]}, "mrope_section="),
    ({"rope_type": "default", "short_mscale": 1.2}, "short_mscale=1.2"),
    ({"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}, "partial_rotary"),
]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("rope", "message"), ROPES)
def test_ropes_are_read_whole_or_refused(family, key, rope, message):
    settings = settings_of(family, **{"rope_scaling": None, "rope_parameters": None, key: rope})
    with pytest.raises(ValueError, match=message):
        read(family, settings)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 2.0}, "factor=2.0 is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_type": "yarn", "factor": 4.0}, "rope type 'yarn' and mrope_section"),
    ],
)
def test_ropes_of_models_that_see_are_read_whole_or_refused(family, change, message):
    settings = settings_of(family)
    settings["text_config"]["rope_scaling"] |= change
    with pytest.raises(ValueError, match=message):
        read(family, settings)


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "vision_config: hidden_act='relu' is not supported"),
        ({"num_channels": 4}, "vision_config: num_channels=4 is not supported, only 3"),
        ({"attention_bias": True}, "vision_config attention_bias|attention_bias=True"),
        ({"layer_scale": 0.5}, "layer_scale=0.5 is not supported"),
        ({"use_rms_norm": True}, "use_rms_norm=True is not supported"),
        ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "axial"}}, "rope_parameters=.*500"),
    ],
)
def test_keys_of_towers_are_read_or_refused(family, change, message):
    settings = settings_of(family)
    settings["vision_config"] |= change
    with pytest.raises(ValueError, match=message):
        read(family, settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # as a reader of Qwen's page adds it to what transformers 5 wrote
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            "say different things",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "rope_theta": 5e6},
            "rope_theta=5000000.0 say different things",
        ),
    ],
)
def test_two_keys_that_disagree_are_refused(tmp_path, change, message):
    config, params = wider("qwen3 tied")
    written(tmp_path, config, params)
    change_config(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        open_model(str(tmp_path))


def test_two_keys_that_agree_are_read(tmp_path):
    config, params = wider("qwen3 tied")
    written(tmp_path, config, params)
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    change_config(tmp_path, rope_parameters=rope, rope_scaling=rope, rope_theta=1000.0)
    assert open_model(str(tmp_path)).config == config


GGUF = {"llama": "llama tied", "qwen2": "qwen2 tied", "qwen3": "qwen3 tied"}
GGUF |= {"qwen3moe": "qwen3_moe tied"}


@pytest.mark.parametrize("architecture", GGUF)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", 8),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.scale", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.25),
        ("residual_scale", 0.5),
        ("embedding_scale", 12.0),
        ("rope.scale_linear", 4.0),
        ("rope.dimension_sections", [2, 1, 1, 0]),
        ("expert_shared_count", 1),
        ("expert_group_count", 4),
        ("expert_gating_func", 2),
        ("leading_dense_block_count", 1),
        ("expert_weights_scale", 2.5),
    ],
)
def test_keys_of_a_gguf_are_read_or_refused(architecture, key, value, tmp_path):
    config, params = wider(GGUF[architecture])
    metadata = {f"{architecture}__{key.replace('.', '__')}": value}
    path = write_gguf(tmp_path / "m", config, tensors_of(config, params, "gguf"), **metadata)
    with pytest.raises(ValueError, match=f"{architecture}.{key}=.* is not supported"):
        open_model(str(path))


@pytest.mark.parametrize("architecture", GGUF)
def test_keys_of_a_gguf_that_change_nothing_pass(architecture, tmp_path):
    config, params = wider(GGUF[architecture])
    metadata = {
        "attention__sliding_window": 64,
        "expert_shared_count": 0,
        "logit_scale": 1.0,
        "rope__scaling__type": "none",
        "rope__scaling__finetuned": 0,
    }
    if config.num_experts:
        metadata["expert_weights_norm"] = int(config.norm_topk)
    metadata = {f"{architecture}__{key}": value for key, value in metadata.items()}
    path = write_gguf(tmp_path / "m", config, tensors_of(config, params, "gguf"), **metadata)
    assert open_model(str(path)).config == config


PICTURES = [
    ("do_resize", False),
    ("do_rescale", False),
    ("do_normalize", False),
    ("rescale_factor", 1 / 127.5),
    ("resample", 0),
    ("do_pan_and_scan", True),
]


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize(("key", "value"), PICTURES)
@pytest.mark.parametrize("nested", [False, True])
def test_pictures_are_made_as_the_files_say_or_refused(family, key, value, nested, tmp_path):
    """In preprocessor_config.json, or in processor_config.json as transformers 5 writes it."""
    config, params = wider(EACH[family])
    written(tmp_path, config, params)
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {key: value}
    if nested:
        settings, path = {"image_processor": settings}, tmp_path / "processor_config.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f"{key}={value} is not supported"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("family", SEEING)
def test_the_nested_settings_of_pictures_are_read(family, tmp_path):
    config, params = wider(EACH[family])
    written(tmp_path, config, params)
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"image_mean": [0.1, 0.2, 0.3]}
    path.unlink()
    nested = {"image_processor": settings, "processor_class": "SomeProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert open_model(str(tmp_path)).config.vision.mean == (0.1, 0.2, 0.3)


ODD = [None, True, False, 0, 1, -1, 1.5, 1e300, 2**40, "", "x", [], [1], ["a"], [[1]], {}]
ODD += [{"a": 1}, {"rope_type": 5}, {"rope_theta": [1]}, {"rope_type": "yarn"}]
ODD += [{"rope_type": "llama3"}, {"full_attention": {"rope_theta": [1]}}, float("nan")]


def places(tree, path=()):
    """Paths of all keys of nested objects."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("family", EACH)
def test_any_value_of_any_key_is_read_or_refused_in_one_line(family):
    base = settings_of(family, rope_parameters=None, layer_types=None, sliding_window=None)
    for path in places(base):
        for odd in ODD:
            settings = json.loads(json.dumps(base))
            inner = functools.reduce(lambda tree, key: tree[key], path[:-1], settings)
            inner[path[-1]] = odd
            try:
                check_hf_config(settings, "config.json")
                read(family, settings)
            except ValueError as error:
                assert "\n" not in str(error), (path, odd)


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"sliding_window": None}, 0),
        ({"sliding_window": 0}, 0),
        ({"sliding_window": 64}, 0),
        ({"sliding_window": 1 << 20}, 0),
        ({"sliding_window": 63}, 63),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, 8),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 2}, 0),
        ({"max_position_embeddings": 8192, "sliding_window": ...}, 4096),  # transformers' default
    ],
)
def test_mistrals_window_is_read(change, window):
    settings = {k: v for k, v in (settings_of("mistral") | change).items() if v is not ...}
    config = read("mistral", settings)
    assert config.sliding_window == window and all(config.windowed) == bool(window)
    assert config.rope_local_theta == config.rope_theta == 1000.0
    if config.max_position == 64:
        back = FAMILIES["mistral"].config_to_hf(config)
        assert back["sliding_window"] == (window or None) and read("mistral", back) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types of full_att"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "without rope scaling"),
        (
            {"sliding_window": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "sliding_window=64 is supported in all layers and without",
        ),
    ],
)
def test_windows_of_mistral_that_the_network_has_not(change, message):
    with pytest.raises(ValueError, match=message):
        read("mistral", settings_of("mistral", **{"sliding_window": 8} | change))


def test_random_mistrals_can_be_written(tmp_path):
    config = open_model("random:mistral?hidden=32&layers=2&window=8&rope_theta=500").config
    assert config.sliding_window == 8 and config.rope_local_theta == 500.0
    assert FAMILIES["mistral"].config_from_hf(FAMILIES["mistral"].config_to_hf(config)) == config
    with pytest.raises(ValueError, match="mistral with full_every is not supported"):
        open_model("random:mistral?window=8&full_every=2")
    with pytest.raises(ValueError, match="all layers of random:mistral.* have windows"):
        open_model("random:mistral?window=8", yarn_factor=2.0)
