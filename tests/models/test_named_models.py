"""Every model that docs/models.md names: its config.json, made small, opens and is written again.

Keys are those of the released files, as they stand there; numbers of layers and widths are small.
"""

import dataclasses
import json
import re

import numpy as np
import pytest
import safetensors.numpy
from support.family_models import drawn_params as drawn_text
from support.model_files import gemma
from support.paths import ROOT
from support.seeing_models import drawn_params as drawn_seeing

from distflow_jax.models.families.name_map import unstacked_arrays
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder
from distflow_jax.models.weights.source import FAMILIES, open_model

PAGE = (ROOT / "docs/models.md").read_text()
# sizes of a small model; the keys of widths and numbers of heads differ from tower to tower
SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
SMALL_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "depth": 3,
    "num_heads": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
}


def llama(**own):
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14_336,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "vocab_size": 128_256,
    }
    return keys | own


def llama_rope(factor):
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def without(keys, *names):
    return {key: value for key, value in keys.items() if key not in names}


def mistral(**own):
    keys = without(llama(), "mlp_bias", "pretraining_tp", "attention_bias", "rope_scaling")
    keys |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return keys | {"rope_theta": 1e6, "sliding_window": None} | own


def qwen2(**own):
    keys = without(llama(), "mlp_bias", "pretraining_tp", "attention_bias", "rope_scaling")
    keys |= {
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": 32_768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1e6,
        "sliding_window": 32_768,
        "use_sliding_window": False,
    }
    return keys | own


def qwen3(**own):
    keys = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
    }
    return qwen2(**keys) | own


def qwen3_moe(**own):
    keys = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    }
    return qwen3(**keys) | own


def mixtral(**own):
    keys = {
        "architectures": ["MixtralForCausalLM"],
        "max_position_embeddings": 32_768,
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
    }
    return mistral(**keys) | own


def gemma_seeing(**text):
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
        "eos_token_id": [1, 106],
        "image_token_index": 262_144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "head_dim": 256,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "model_type": "gemma3_text",
            "num_attention_heads": 8,
            "num_hidden_layers": 34,
            "num_key_value_heads": 4,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            "vocab_size": 262_208,
            **text,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


def smolvlm(**own):
    keys = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": 49_190,
        "model_type": "smolvlm",
        "pad_token_id": 128_002,
        "scale_factor": 4,
        "text_config": {
            "_flash_attn_2_enabled": True,
            "_name_or_path": "None",
            "architectures": ["VLlama3ForCausalLM"],
            "head_dim": 64,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "neftune_noise_alpha": 0.0,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pad_token_id": 2,
            "perceiver_config": {"attention_dropout": 0.0, "qk_layer_norms_perceiver": False},
            "pixel_shuffle_factor": 4,
            "qk_layer_norms": False,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_theta": 100_000,
            "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "use_resampler": False,
            "vocab_size": 49_280,
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vision_config": {
            "hidden_size": 768,
            "image_size": 512,
            "max_image_size": {"longest_edge": 512},
            "model_type": "smolvlm_vision",
            "num_attention_heads": 12,
            "patch_size": 16,
            "size": {"longest_edge": 2048},
            "tie_word_embeddings": False,
            "use_base_siglip": False,
        },
        "vocab_size": 49_280,
    }
    return keys | own


QWEN2_5_VL = qwen2(
    architectures=["Qwen2_5_VLForConditionalGeneration"],
    image_token_id=151_655,
    max_position_embeddings=128_000,
    max_window_layers=28,
    model_type="qwen2_5_vl",
    rope_scaling={"mrope_section": [16, 24, 24], "type": "mrope"},
    video_token_id=151_656,
    vision_config={
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
    vision_end_token_id=151_653,
    vision_start_token_id=151_652,
    vision_token_id=151_654,
)
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151_655,
    "model_type": "qwen3_vl",
    "text_config": without(qwen3(), "use_sliding_window", "max_window_layers", "sliding_window")
    | {
        "max_position_embeddings": 262_144,
        "model_type": "qwen3_vl_text",
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5_000_000,
        "tie_word_embeddings": True,
    },
    "tie_word_embeddings": True,
    "video_token_id": 151_656,
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151_653,
    "vision_start_token_id": 151_652,
}
# {name on the page: (config.json, what the config says of it)}
RELEASED = {
    "Llama 2": (
        without(llama(max_position_embeddings=4096, rope_theta=10_000.0), "num_key_value_heads"),
        {"num_kv_heads": 4, "rope_theta": 1e4},
    ),
    "Llama 3": (llama(), {"rope_theta": 5e5, "rope_scaling": None}),
    "Llama 3.1": (
        llama(rope_scaling=llama_rope(8.0), max_position_embeddings=131_072),
        {"max_position": 131_072},
    ),
    "Llama 3.2": (
        llama(rope_scaling=llama_rope(32.0), tie_word_embeddings=True, head_dim=64),
        {"tie_embeddings": True, "head_dim": 16},
    ),
    "SmolLM2": (
        llama(
            is_llama_config=True,
            rope_interleaved=False,
            rope_theta=100_000,
            tie_word_embeddings=True,
            **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        ),
        {"rope_theta": 1e5},
    ),
    "DeepSeek-R1-Distill-Llama": (
        llama(rope_scaling=llama_rope(8.0), max_position_embeddings=131_072),
        {"tie_embeddings": False},
    ),
    "Mistral 7B v0.1": (
        mistral(rope_theta=10_000.0, sliding_window=4096, max_position_embeddings=32_768),
        {"sliding_window": 4096, "full_every": 0, "rope_local_theta": 1e4},
    ),
    "Mistral 7B v0.3": (mistral(max_position_embeddings=32_768), {"sliding_window": 0}),
    "Mistral Nemo": (
        mistral(head_dim=128, max_position_embeddings=131_072),
        {"head_dim": 16, "rope_theta": 1e6},
    ),
    "Mistral Small 2501": (
        mistral(head_dim=128, max_position_embeddings=32_768, rope_theta=1e8),
        {"rope_theta": 1e8},
    ),
    "Ministral 8B": (
        mistral(
            head_dim=128, max_position_embeddings=32_768, sliding_window=32_768, rope_theta=1e8
        ),
        {"sliding_window": 0},
    ),
    "Qwen2": (qwen2(tie_word_embeddings=True), {"attention_bias": True}),
    "Qwen2.5": (
        qwen2(max_position_embeddings=131_072, sliding_window=131_072, use_mrope=False),
        {"sliding_window": 0},
    ),
    "DeepSeek-R1-Distill-Qwen": (
        qwen2(max_position_embeddings=131_072, rope_theta=10_000, sliding_window=4096),
        {"rope_theta": 1e4, "sliding_window": 0},
    ),
    "Qwen3": (qwen3(), {"qk_norm": True, "head_dim": 16}),
    "Gemma 3 270M": (
        gemma(
            _sliding_window_pattern=6,
            layer_types=(["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]),
            use_bidirectional_attention=False,
        ),
        {"sliding_window": 512, "full_every": 6, "vision": None},
    ),
    "Gemma 3 1B": (gemma(), {"sliding_window": 512, "full_every": 6, "tie_embeddings": True}),
    "Gemma 3 4B": (gemma_seeing(), {"rope_factor": 8.0, "tie_embeddings": True}),
    "Gemma 3 27B": (
        gemma_seeing(head_dim=128, query_pre_attn_scalar=168),
        {"query_scalar": 168, "sliding_window": 1024},
    ),
    "Qwen3-30B-A3B": (qwen3_moe(), {"num_experts": 8, "norm_topk": True}),
    "Qwen3-Coder-30B-A3B": (
        qwen3_moe(
            max_position_embeddings=262_144,
            qkv_bias=False,
            rope_theta=10_000_000,
            shared_expert_intermediate_size=0,
            use_qk_norm=True,
        ),
        {"qk_norm": True, "max_position": 262_144},
    ),
    "Qwen3-235B-A22B": (qwen3_moe(max_window_layers=94), {"experts_per_token": 2}),
    "Mixtral 8x7B": (mixtral(), {"num_experts": 8}),
    "Mixtral 8x22B": (
        mixtral(max_position_embeddings=65_536, router_jitter_noise=0.0),
        {"max_position": 65_536},
    ),
    "SmolVLM": (
        smolvlm(
            architectures=["Idefics3ForConditionalGeneration"],
            model_type="idefics3",
            vision_config=smolvlm()["vision_config"] | {"model_type": "idefics3"},
        ),
        {"tie_embeddings": False, "family": "smolvlm"},
    ),
    "SmolVLM2": (smolvlm(tie_word_embeddings=True, use_reentrant_checkpointing=False), {}),
    "Qwen2.5-VL": (QWEN2_5_VL, {"rope_sections": (2, 3, 3)}),
    "Qwen3-VL": (QWEN3_VL, {"rope_sections": (4, 2, 2), "rope_interleaved": True}),
}


def named():
    """{family: names of its models} of the table in docs/models.md, without what is in brackets."""
    rows = re.findall(r"^\| ([\w.\- ]+) \| (.+) \| (`.+`) \|$", PAGE, re.MULTILINE)
    return {
        family: [name.strip() for name in re.sub(r"\([^)]*\)", "", models).split(",")]
        for family, models, _ in rows
        if family != "family"
    }


def small(settings):
    """The config.json with small sizes where it has sizes."""
    cut = settings | {key: value for key, value in SMALL.items() if key in settings}
    rope = cut.get("rope_scaling") or {}
    if "mrope_section" in rope:
        sections = [4, 2, 2] if rope.get("mrope_interleaved") else [2, 3, 3]
        cut["rope_scaling"] = rope | {"mrope_section": sections}
        cut["head_dim"] = 16
    if "text_config" in cut:
        cut["text_config"] = small(cut["text_config"])
    tower = cut.get("vision_config")
    if tower:
        tower = tower | {key: value for key, value in SMALL_TOWER.items() if key in tower}
        tower |= {"intermediate_size": 48} if "depth" not in tower else {}
        tower |= {"num_hidden_layers": 2} if "depth" not in tower else {}
        side = 4 * tower["patch_size"]
        cut["vision_config"] = tower | ({"image_size": side} if "image_size" in tower else {})
        cut |= {"mm_tokens_per_image": 4} if "mm_tokens_per_image" in cut else {}
        cut |= {"scale_factor": 2} if "scale_factor" in cut else {}
        ids = {"image_token_id": 299, "image_token_index": 299}
        cut |= {key: value for key, value in ids.items() if key in cut}
    return cut


def write(folder, settings):
    """The folder of a model with drawn weights, in the names of Hugging Face's files."""
    kind = settings["model_type"]
    family = FAMILIES[{"gemma3_text": "gemma3", "idefics3": "smolvlm"}.get(kind, kind)]
    config = family.config_from_hf(settings)
    drawn = dict((drawn_text if config.vision is None else drawn_seeing)(config))
    tensors = {
        name: np.ascontiguousarray(tensor)
        for path, array in drawn.items()
        for name, tensor in unstacked_arrays(family.hf_weights(config), path, array)
    }
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))
    Tokenizer.byte_level(300).backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return config, drawn


def test_the_page_names_what_is_tried_here_and_nothing_else():
    names = [name for models in named().values() for name in models]
    assert sorted(names) == sorted(RELEASED)
    assert len(named()) == len(FAMILIES)


@pytest.mark.parametrize("name", [name for models in named().values() for name in models])
def test_a_named_model_is_read_and_written(name, tmp_path):
    settings, wanted = RELEASED[name]
    config, params = write(tmp_path / "released", small(settings))
    assert {key: getattr(config, key) for key in wanted} == wanted
    source = open_model(str(tmp_path / "released"))
    assert source.config == config
    write_hf_folder(tmp_path / "own", Export(config, source.tokenizer, source.params))
    again = open_model(str(tmp_path / "own"))
    same = dataclasses.replace(again.config, vision=config.vision)
    assert same == config
    read, back = dict(source.params()), dict(again.params())
    assert read.keys() == back.keys() == params.keys()
    for path, array in params.items():
        np.testing.assert_array_equal(read[path], array, err_msg=path)
        np.testing.assert_array_equal(back[path], array, err_msg=path)


@pytest.mark.parametrize(
    "spec",
    [
        spec
        for cell in re.findall(r"\| (`[\w?=&.`, ]+`) \|$", PAGE, re.MULTILINE)
        for spec in re.findall(r"`([^`]+)`", cell)
    ],
)
def test_random_models_of_the_page_open(spec):
    small = "&hidden=64&layers=2&mlp=64"
    config = open_model(f"random:{spec}{'' if '?' in spec else '?'}{small}").config
    assert config.num_layers == 2
