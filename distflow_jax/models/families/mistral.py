"""Mistral: Llama's network, in older models with a window in every layer.

Jiang et al. 2023 (arxiv.org/abs/2310.06825), sec. 2. Reads and writes Hugging Face's files; GGUF
files of Mistral have the architecture llama. A window that is no shorter than the longest sequence
limits nothing and is left out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.hf_config import SLIDING, decoder_from_hf, decoder_to_hf
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.tensors import hf_decoder

SWITCHES: Mapping[str, bool] = {}  # fields of DecoderConfig that are on in this family
_WINDOW, _POSITIONS = 4096, 131_072  # transformers' defaults of keys that a file lacks


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    config = decoder_from_hf("mistral", {**raw, "sliding_window": None}, max_position=_POSITIONS)
    window = raw.get("sliding_window", _WINDOW) or 0
    window = window if window < config.max_position else 0
    types = set(raw.get("layer_types") or (SLIDING,))
    if window and (config.rope_scaling or types != {SLIDING}):
        raise ValueError(
            f"mistral with sliding_window={window} is supported in all layers and without rope "
            f"scaling, got layer_types of {', '.join(sorted(types))} and {config.rope_scaling}"
        )
    return dataclasses.replace(config, sliding_window=window, rope_local_theta=config.rope_theta)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf."""
    window, theta = config.sliding_window, config.rope_theta
    settings = decoder_to_hf(
        config, "MistralForCausalLM", sliding_window=window, rope_local_theta=theta, **SWITCHES
    )
    return settings | {"sliding_window": window or None}


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    return hf_decoder(config)
