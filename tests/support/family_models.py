"""One tiny model of each family, with weights that any program can draw: NumPy and nothing else."""

import zlib
from collections.abc import Iterator

import numpy as np

from distflow_jax.models.decoder_config import DecoderConfig, Llama3Scaling, YarnScaling
from distflow_jax.models.families import gemma3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe

_SIZES = dict(
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_size=64,
    rope_theta=1000.0,
    max_position=64,
)
# 6 tokens were enough to train it, TOKENS are 24: pairs that are left alone, between and stretched
_YARN = YarnScaling(factor=4.0, original_max_position=6, beta_fast=0.9, beta_slow=0.02)
_OWN_YARN = YarnScaling(2.5, 10, 1.5, 0.04, attention_factor=1.3, truncate=False)
_SCALING = Llama3Scaling(factor=8.0, original_max_position=16)
_LLAMA = DecoderConfig(**_SIZES, head_dim=8, family="llama", norm_eps=1e-5)
_QWEN2 = DecoderConfig(**_SIZES, head_dim=8, family="qwen2", norm_eps=1e-6, attention_bias=True)
# a head dim of its own, as the smaller Qwen3 have
_QWEN3 = DecoderConfig(**_SIZES, head_dim=16, family="qwen3", norm_eps=1e-6, qk_norm=True)
_EXPERTS = dict(mlp_size=24, num_experts=8, experts_per_token=3)
_QWEN3_MOE = DecoderConfig(**vars(_QWEN3) | _EXPERTS | {"family": "qwen3_moe"})
_MIXTRAL = DecoderConfig(**vars(_LLAMA) | _EXPERTS | {"family": "mixtral"})
_UNTIED = {"tie_embeddings": False}
# a head dim of its own, as Nemo and Small 3 have, and a window as the first 7B has
_MISTRAL = DecoderConfig(
    **vars(_LLAMA) | _UNTIED | {"family": "mistral", "head_dim": 16, "rope_local_theta": 1000.0}
)
# windows shorter than TOKENS in layers 1 and 3, and scales that no other number gives
_GEMMA3 = DecoderConfig(
    **_SIZES | {"num_layers": 3},
    head_dim=16,
    family="gemma3",
    norm_eps=1e-6,
    sliding_window=7,
    full_every=2,
    rope_local_theta=100.0,
    query_scalar=12,
    **gemma3.SWITCHES,
)
_STRETCHED = {"rope_factor": 8.0, "query_scalar": 0, "full_every": 3}

FAMILY_MODULES = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
}
CASES = {
    "llama tied": _LLAMA,
    "llama untied": DecoderConfig(**vars(_LLAMA) | _UNTIED | {"rope_scaling": _SCALING}),
    "mistral untied": _MISTRAL,
    "mistral windows": DecoderConfig(**vars(_MISTRAL) | {"sliding_window": 7, "head_dim": 8}),
    "mistral yarn": DecoderConfig(
        **vars(_MISTRAL) | {"head_dim": 16, "rope_scaling": _YARN, "max_position": 24}
    ),
    "qwen2 tied": _QWEN2,
    "qwen2 untied": DecoderConfig(**vars(_QWEN2) | _UNTIED),
    "qwen2 yarn": DecoderConfig(
        **vars(_QWEN2) | {"head_dim": 16, "rope_scaling": _YARN, "max_position": 24}
    ),
    "qwen3 yarn": DecoderConfig(**vars(_QWEN3) | {"rope_scaling": _OWN_YARN, "max_position": 25}),
    "qwen3 tied": _QWEN3,
    "qwen3 untied": DecoderConfig(**vars(_QWEN3) | _UNTIED),
    "qwen3_moe tied": DecoderConfig(**vars(_QWEN3_MOE) | {"norm_topk": False}),
    "qwen3_moe untied": DecoderConfig(**vars(_QWEN3_MOE) | _UNTIED),
    "mixtral untied": DecoderConfig(**vars(_MIXTRAL) | _UNTIED),
    "gemma3 tied": _GEMMA3,
    "gemma3 untied": DecoderConfig(**vars(_GEMMA3) | _UNTIED | _STRETCHED),
}
# `rope_scaling` of config.json files, of heads and thetas as released models have them
ROPES = {
    "Qwen2.5": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 32_768},
    ),
    "mscale": (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        {"head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 163_840},
    ),
    "not truncated": (
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
        {"head_dim": 64, "rope_theta": 150_000.0, "max_position_embeddings": 131_072},
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 48, 24).astype(np.int32)  # [T]


def drawn_params(config: DecoderConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(path, float32 parameter, layers stacked), each from a generator of its own.

    Norms multiply with about 1 and biases are as large as what they are added to: none may be
    forgotten.
    """
    for weight in FAMILY_MODULES[config.family].hf_weights(config):
        rng = np.random.default_rng(zlib.crc32(weight.path.encode()))
        noise = rng.standard_normal(weight.param_shape(config.num_layers))
        if weight.path.endswith("norm"):
            value = 0.3 * noise + (0 if config.norm_offset else 1)
        elif weight.path.endswith("bias"):
            value = noise
        else:
            value = 0.2 * noise
        yield weight.path, value.astype(np.float32)
