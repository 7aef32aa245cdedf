"""SmolVLM: a Llama model, a SigLIP tower and a pixel shuffle, in Idefics3's layout.

Marafioti et al. 2025 (arxiv.org/abs/2504.05299). A Llama model with a new SigLIP tower is written
in this form, too.
"""

from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.hf_config import decoder_from_hf, decoder_to_hf, text_from_hf
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.tensors import hf_decoder
from distflow_jax.models.families.tower_config import vision_from_hf, vision_to_hf
from distflow_jax.models.families.tower_tensors import linear_projector, renamed, siglip_weights

SWITCHES: Mapping[str, bool] = {}  # fields of DecoderConfig that are on in this family
# names of a model that was saved without its head, and those of hf_weights
NAMES = {r"(?=(text_model|vision_model|connector)\.)": "model."}
# transformers' defaults of keys that a file's text_config lacks; without one, the epsilon is 1e-5
_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    whole = {"rms_norm_eps": 1e-5} if raw.get("text_config") is None else {}
    text = text_from_hf(raw, _DEFAULTS | whole)
    if text.get("model_type", "llama") != "llama":
        raise ValueError(f"smolvlm with text model {text['model_type']!r} is not supported")
    vision = vision_from_hf("smolvlm", raw, text["hidden_size"])
    return decoder_from_hf("smolvlm", text, max_position=2048, vision=vision)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf."""
    assert config.vision is not None, "a smolvlm model has a tower"
    text = decoder_to_hf(config, "LlamaForCausalLM")
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "tie_word_embeddings": config.tie_embeddings,
        "text_config": text | {"model_type": "llama"},
        **vision_to_hf(config.vision),
    }


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    assert config.vision is not None, "a smolvlm model has a tower"
    return (
        *renamed(hf_decoder(config), "model.text_model."),
        *siglip_weights(config.vision, "model.vision_model."),
        *linear_projector(config.vision, "model.connector.modality_projection.proj.weight"),
    )
