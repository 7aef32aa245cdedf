"""Dense Qwen3 models: Llama's network with a norm of each head's query and key.

Yang et al. 2025 (arxiv.org/abs/2505.09388), sec. 2. Reads Hugging Face and GGUF, as llama.py. The
head dim is independent of hidden size / heads. `attention_bias`, which no released model sets, is
not supported, as for Llama.
"""

from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.hf_config import decoder_from_hf, decoder_to_hf
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.tensors import (
    gguf_decoder,
    gguf_head_norms,
    hf_decoder,
    hf_head_norms,
)

SWITCHES: Mapping[str, bool] = {"qk_norm": True}  # fields of DecoderConfig on in this family


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    return decoder_from_hf("qwen3", raw, head_dim=128, max_position=32_768, **SWITCHES)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf."""
    return decoder_to_hf(config, "Qwen3ForCausalLM", **SWITCHES)


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    return (*hf_decoder(config), *hf_head_norms(config))


def gguf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a GGUF file (in NumPy's order, the reverse of the file's)."""
    return (*gguf_decoder(config, interleaved=False), *gguf_head_norms(config))
