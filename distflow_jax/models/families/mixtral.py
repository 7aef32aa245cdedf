"""Mixtral: Llama's network with experts in every layer.

Jiang et al. 2024 (arxiv.org/abs/2401.04088), sec. 2.1. Reads and writes Hugging Face's files. Its
GGUF files have the architecture llama and are rejected there. `router_jitter_noise`, transformers'
noise on tokens during training, is not applied, so that sampler and trainer agree.
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
from distflow_jax.models.families.tensors import hf_decoder, hf_experts, joined_experts

SWITCHES: Mapping[str, bool] = {}  # fields of DecoderConfig that are on in this family
_EXPERTS = ("block_sparse_moe", "w1", "w3", "w2")
# names of transformers 5, and those of hf_weights
NAMES = {r"(model\.)?(layers\.\d+)\.mlp\.gate\.": r"model.\2.block_sparse_moe.gate."}
JOINED = joined_experts(*_EXPERTS)
# transformers' defaults of keys that a file lacks
_DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    # transformers applies a window, if there is one, in all layers of this family
    windows = {"max_window_layers": 0, "layer_types": None}
    windows["use_sliding_window"] = bool(raw.get("sliding_window"))
    return decoder_from_hf(
        "mixtral",
        {**_DEFAULTS, **raw, **windows},
        read=EXPERTS,
        max_position=131_072,
        **experts_from_hf(raw),
        **SWITCHES,
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf."""
    if not config.norm_topk:
        raise ValueError(
            "a mixtral model with norm_topk=False has no form in Hugging Face's files: use the "
            "family qwen3_moe"
        )
    settings = decoder_to_hf(config, "MixtralForCausalLM", mixture=True, **SWITCHES)
    return settings | {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    return hf_decoder(config, hf_experts(config, *_EXPERTS))
