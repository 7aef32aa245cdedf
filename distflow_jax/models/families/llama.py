"""Llama: translation of Hugging Face's and GGUF's configs, and both tables of tensor names.

Biases are not supported: with `attention_bias` Hugging Face's Llama has a bias after attention,
too, which the network does not have.
"""

from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.hf_config import decoder_from_hf, decoder_to_hf
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.tensors import gguf_decoder, hf_decoder

SWITCHES: Mapping[str, bool] = {}  # fields of DecoderConfig that are on in this family


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    return decoder_from_hf("llama", raw, max_position=2048)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf."""
    return decoder_to_hf(config, "LlamaForCausalLM")


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    return hf_decoder(config)


def gguf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a GGUF file (in NumPy's order, the reverse of the file's)."""
    return gguf_decoder(config, interleaved=True)
