"""Qwen3 mixtures of experts: Qwen3's network with experts in every layer, without shared experts.

Yang et al. 2025 (arxiv.org/abs/2505.09388), sec. 2. Reads Hugging Face and GGUF, as llama.py. In
GGUF the architecture is `qwen3moe`.
"""

from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.hf_config import (
    EXPERTS,
    decoder_from_hf,
    decoder_to_hf,
    experts_from_hf,
)
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.qwen3 import SWITCHES
from distflow_jax.models.families.tensors import (
    gguf_decoder,
    gguf_experts,
    gguf_head_norms,
    hf_decoder,
    hf_experts,
    hf_head_norms,
    joined_experts,
)

_EXPERTS = ("mlp", "gate_proj", "up_proj", "down_proj")
JOINED = joined_experts(*_EXPERTS)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    return decoder_from_hf(
        "qwen3_moe",
        # transformers applies a window, if it is on, in all layers of this family
        {**raw, "max_window_layers": 0, "layer_types": None},
        read=EXPERTS,
        max_position=32_768,
        mlp_size="moe_intermediate_size",
        norm_topk=bool(raw.get("norm_topk_prob", False)),
        **experts_from_hf(raw),
        **SWITCHES,
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf."""
    settings = decoder_to_hf(config, "Qwen3MoeForCausalLM", mixture=True, **SWITCHES)
    return settings | {
        # size of dense layers, which do not occur; set to that of all experts of a token together
        "intermediate_size": config.mlp_size * config.experts_per_token,
        "moe_intermediate_size": config.mlp_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.norm_topk,
    }


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    return (*hf_decoder(config, hf_experts(config, *_EXPERTS)), *hf_head_norms(config))


def gguf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a GGUF file (in NumPy's order, the reverse of the file's)."""
    decoder = gguf_decoder(config, gguf_experts(config), interleaved=False)
    return (*decoder, *gguf_head_norms(config))
