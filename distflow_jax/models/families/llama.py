"""Llama: translation of Hugging Face's and GGUF's configs, and both tables of tensor names.

Biases are not supported: with `attention_bias` Hugging Face's Llama has a bias after attention,
too, which the network does not have.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.gguf_config import decoder_from_gguf
from distflow_jax.models.families.hf_config import decoder_from_hf, decoder_to_hf
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.tensors import gguf_decoder, hf_decoder

SWITCHES: Mapping[str, bool] = {}  # fields of DecoderConfig that are on in this family
_BIASES = ("attention_bias", "mlp_bias")


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    return decoder_from_hf("llama", raw, refused=_BIASES, max_position=2048)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf."""
    return decoder_to_hf(config, "LlamaForCausalLM", named=_BIASES)


def config_from_gguf(
    fields: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_freqs: np.ndarray | None = None,
) -> DecoderConfig:
    """Config of a GGUF file's metadata; `rope_freqs` [H/2] is its tensor of that name."""
    biased = [name for name in tensor_names if name.endswith(".bias")]
    if biased:
        raise ValueError(f"llama with biases ({biased[0]}) is not supported")
    return decoder_from_gguf("llama", fields, tensor_names, rope_freqs)


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    return hf_decoder(config)


def gguf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a GGUF file (in NumPy's order, the reverse of the file's)."""
    return gguf_decoder(config, interleaved=True)
