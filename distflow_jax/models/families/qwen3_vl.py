"""Dense Qwen3-VL: a Qwen3 model with interleaved rotary positions, and a tower with DeepStack.

Bai et al. 2025 (arxiv.org/abs/2511.21631), sec. 2.
"""

from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families import qwen3
from distflow_jax.models.families.hf_config import (
    decoder_from_hf,
    decoder_to_hf,
    sections_from_hf,
    sections_to_hf,
    text_from_hf,
)
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.tower_config import vision_from_hf, vision_to_hf
from distflow_jax.models.families.tower_tensors import qwen_weights, renamed

SWITCHES: Mapping[str, bool] = qwen3.SWITCHES  # fields of DecoderConfig on in this family
_TEXT = "qwen3_vl_text"
NAMES = {r"(?=(language_model|visual)\.)": "model."}  # names without the head, and of hf_weights


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    sections, text = sections_from_hf("qwen3_vl", text_from_hf(raw, {}), theta=5e5)
    vision = vision_from_hf("qwen3_vl", raw, text.get("hidden_size", 0))
    return decoder_from_hf(
        "qwen3_vl",
        text,
        head_dim=128,
        max_position=128_000,
        vision=vision,
        rope_sections=sections,
        rope_interleaved=True,
        **SWITCHES,
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf."""
    assert config.vision is not None, "a qwen3_vl model has a tower"
    text = decoder_to_hf(config, "Qwen3ForCausalLM", **SWITCHES)
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": config.tie_embeddings,
        "text_config": text | {"model_type": _TEXT} | sections_to_hf(config),
        **vision_to_hf(config.vision),
    }


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    assert config.vision is not None, "a qwen3_vl model has a tower"
    text = renamed(qwen3.hf_weights(config), "model.language_model.")
    return (*text, *qwen_weights(config.vision, "model.visual."))
