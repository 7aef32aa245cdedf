"""Qwen2 and Qwen2.5: Llama's network with biases of query, key and value.

Yang et al. 2024 (arxiv.org/abs/2407.10671), sec. 2.2. Reads Hugging Face and GGUF, as llama.py.
"""

from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.hf_config import decoder_from_hf, decoder_to_hf
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.tensors import (
    GGUF_LAYER,
    HF_LAYER,
    gguf_decoder,
    head_vectors,
    hf_decoder,
)

# fields of DecoderConfig that are on in this family; its files have no switch for the biases
SWITCHES: Mapping[str, bool] = {"attention_bias": True}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    return decoder_from_hf("qwen2", raw, max_position=32_768, **SWITCHES)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf."""
    return decoder_to_hf(config, "Qwen2ForCausalLM", **SWITCHES)


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    names = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
    return (*hf_decoder(config), *_biases(config, [HF_LAYER + name for name in names]))


def gguf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a GGUF file (in NumPy's order, the reverse of the file's)."""
    names = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
    biases = _biases(config, [GGUF_LAYER + name for name in names])
    return (*gguf_decoder(config, interleaved=False), *biases)


def _biases(config: DecoderConfig, names: list[str]) -> tuple[Weight, ...]:
    """Biases of query, key and value, by their `names` in a layer."""
    query, key, value = names
    kv_heads, head_dim = config.num_kv_heads, config.head_dim
    return (
        head_vectors(query, "layers/query_bias", config.num_heads, head_dim),
        head_vectors(key, "layers/key_bias", kv_heads, head_dim),
        head_vectors(value, "layers/value_bias", kv_heads, head_dim),
    )
