"""Qwen2.5-VL: a Qwen2 model with rotary positions of three numbers, and a tower with windows.

Bai et al. 2025 (arxiv.org/abs/2502.13923), sec. 2. Reads both orders of names: those of released
files, and those of transformers 5.
"""

from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families import qwen2
from distflow_jax.models.families.hf_config import (
    decoder_from_hf,
    decoder_to_hf,
    sections_from_hf,
    sections_to_hf,
    text_from_hf,
)
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.tower_config import vision_from_hf, vision_to_hf
from distflow_jax.models.families.tower_tensors import qwen_weights

SWITCHES: Mapping[str, bool] = qwen2.SWITCHES  # fields of DecoderConfig on in this family
_TEXT = "qwen2_5_vl_text"
# names of transformers 5, with the head or without, and those of hf_weights
NAMES = {r"(model\.)?language_model\.": "model.", r"model\.visual\.": "visual."}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    # released files have the text model's keys beside vision_config
    text = text_from_hf(raw, {"rms_norm_eps": 1e-5, **raw})
    sections, text = sections_from_hf("qwen2_5_vl", text, theta=1e6)
    vision = vision_from_hf("qwen2_5_vl", raw, text.get("hidden_size", 0))
    return decoder_from_hf(
        "qwen2_5_vl", text, max_position=32_768, vision=vision, rope_sections=sections, **SWITCHES
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf."""
    assert config.vision is not None, "a qwen2_5_vl model has a tower"
    text = decoder_to_hf(config, "Qwen2ForCausalLM", **SWITCHES)
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": config.tie_embeddings,
        "text_config": text | {"model_type": _TEXT} | sections_to_hf(config),
        **vision_to_hf(config.vision),
    }


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    assert config.vision is not None, "a qwen2_5_vl model has a tower"
    return (*qwen2.hf_weights(config), *qwen_weights(config.vision, "visual."))
