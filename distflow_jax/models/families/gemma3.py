"""Gemma 3: four norms per layer, windows in five layers of six, and scales of its own.

Gemma Team 2025 (arxiv.org/abs/2503.19786), sec. 2. Reads and writes Hugging Face's files of the
text models (`model_type` "gemma3_text") and of image-text models ("gemma3"), with a SigLIP tower.

Norms multiply by 1 + w, and both the files and the network store w, so a model is written bit for
bit as it was read. GGUF files are not supported, because they store 1 + w, which does not give back
w exactly.
"""

from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.hf_config import (
    FULL,
    SLIDING,
    check_rope,
    decoder_from_hf,
    decoder_to_hf,
    text_from_hf,
)
from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.tensors import HF_LAYER, hf_decoder, hf_head_norms, plain
from distflow_jax.models.families.tower_config import vision_from_hf, vision_to_hf
from distflow_jax.models.families.tower_tensors import pooled_projector, renamed, siglip_weights

# fields of DecoderConfig that are on in this family
SWITCHES: Mapping[str, bool | str] = {
    "qk_norm": True,
    "post_norms": True,
    "norm_offset": True,
    "embed_scale": True,
    "activation": "gelu_tanh",
}
_TEXT, _IMAGE_TEXT = "gemma3_text", "gemma3"
HF_TYPES = (_TEXT, _IMAGE_TEXT)  # supported values of `model_type`
# transformers' defaults of keys that a file lacks
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_MAX_POSITION = 131_072
_PATTERN = 6  # every sixth layer has no window, unless a file has another pattern

# names of transformers 4 and 5, and those of hf_weights; 5 leaves out vision_model, and writes some
# without and some with the first model
NAMES = {
    r"language_model\.lm_head\.": "lm_head.",
    r"(model\.)?language_model\.(model\.)?": "language_model.model.",
    r"(model\.)?vision_tower\.(vision_model\.)?": "vision_tower.vision_model.",
    r"model\.multi_modal_projector\.": "multi_modal_projector.",
}
# the same of a text model in an image-text model's files
TEXT_NAMES = {
    r"language_model\.lm_head\.": "lm_head.",
    r"(model\.)?language_model\.(model\.)?": "model.",
}
# keys that this family alone reads
_READ = ("sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq")
_READ += ("query_pre_attn_scalar",)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`; ValueError for features that are not supported."""
    outer, seeing = raw, raw.get("model_type") == _IMAGE_TEXT
    raw = text_from_hf(raw, _DEFAULTS) if seeing else {**_DEFAULTS, **raw}
    theta, factor, scaling, local_theta = _rotations(raw)
    windows = _windows(raw)
    scalar = raw["query_pre_attn_scalar"]
    vision = None
    if seeing and outer.get("vision_config"):
        vision = vision_from_hf("gemma3", outer, raw["hidden_size"])
    plain_rope = {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": theta}
    return decoder_from_hf(
        "gemma3",
        {**raw, **plain_rope},
        read=_READ,
        max_position=_MAX_POSITION,
        rope_factor=factor,
        rope_local_theta=local_theta,
        query_scalar=0 if scalar == raw["head_dim"] else int(scalar) if scalar % 1 == 0 else scalar,
        vision=vision,
        **windows,
        **SWITCHES,
    )


def _rotations(raw: Mapping[str, Any]) -> tuple[float, float, Mapping[str, Any] | None, float]:
    """(theta, linear factor, other scaling) of layers without a window, and theta of the others.

    transformers 5 writes both in `rope_parameters`, by layer type.
    """
    by_type = raw.get("rope_parameters") or {}
    full = by_type.get(FULL) or raw.get("rope_scaling") or {}
    local = by_type.get(SLIDING) or {}
    check_rope("gemma3", full)
    check_rope("gemma3", local)
    theta = float(full.get("rope_theta") or raw["rope_theta"] or _DEFAULTS["rope_theta"])
    local_theta = float(local.get("rope_theta") or raw["rope_local_base_freq"] or 1e4)
    if local.get("rope_type", "default") != "default":
        raise ValueError(
            f"gemma3 with rope type {local['rope_type']!r} in layers with a window is not "
            "supported, only 'default'"
        )
    if full.get("rope_type", full.get("type", "default")) == "linear":
        if "factor" not in full:
            raise ValueError("the linear rope scaling of config.json lacks factor")
        return theta, float(full["factor"]), None, local_theta
    return theta, 1.0, full or None, local_theta


def _windows(raw: Mapping[str, Any]) -> dict[str, int]:
    """sliding_window and full_every by the file's `layer_types`, or by its pattern."""
    layers = raw["num_hidden_layers"]
    # transformers 5 writes the second key
    every = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern"))
    types = raw.get("layer_types") or _layer_types(layers, every or _PATTERN)
    if len(types) != layers or not {FULL, SLIDING}.issuperset(types):
        raise ValueError(
            f"layer_types of config.json must be {layers} of {FULL!r} and {SLIDING!r}, got "
            f"{len(types)}: {', '.join(sorted(set(types)))}"
        )
    if SLIDING not in types:
        return {"sliding_window": 0, "full_every": 0}
    first = types.index(FULL) + 1 if FULL in types else 0
    fits = [n for n in (every, first) if n is not None and _layer_types(layers, n) == types]
    if not fits:
        raise ValueError(
            "gemma3 is supported with full attention in every n-th layer only, and layer_types of "
            f"config.json has it in layers {[i for i, t in enumerate(types) if t == FULL]}"
        )
    if not raw["sliding_window"]:
        raise ValueError("config.json has layers of sliding_attention and no sliding_window")
    return {"sliding_window": raw["sliding_window"], "full_every": fits[0]}


def _layer_types(layers: int, full_every: int) -> list[str]:
    return [
        FULL if full_every and number % full_every == 0 else SLIDING
        for number in range(1, layers + 1)
    ]


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of config_from_hf: a text model, or an image-text model if there is a tower."""
    text = _text_to_hf(config)
    if config.vision is None:
        return text
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": _IMAGE_TEXT,
        "tie_word_embeddings": config.tie_embeddings,
        "text_config": text,
        **vision_to_hf(config.vision),
    }


def _text_to_hf(config: DecoderConfig) -> dict[str, Any]:
    settings = decoder_to_hf(config, "Gemma3ForCausalLM", windows=True, **SWITCHES)
    if config.rope_factor != 1 and config.rope_scaling is not None:
        raise ValueError(
            f"a gemma3 model with rope_factor={config.rope_factor} and {config.rope_scaling} has "
            "no form in Hugging Face's files"
        )
    if config.rope_factor != 1:
        settings["rope_scaling"] = {"rope_type": "linear", "factor": config.rope_factor}
    if config.full_every:
        settings["sliding_window_pattern"] = config.full_every
    settings["hidden_activation"] = settings.pop("hidden_act")
    return settings | {
        "model_type": _TEXT,
        "query_pre_attn_scalar": config.query_scalar or config.head_dim,
        "sliding_window": config.sliding_window or _DEFAULTS["sliding_window"],
        "layer_types": [SLIDING if windowed else FULL for windowed in config.windowed],
        "rope_local_base_freq": config.rope_local_theta,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    D = config.hidden_size
    # post_attention_layernorm is the norm before the MLP in other families, here the one after
    # attention
    shared = (weight for weight in hf_decoder(config) if weight.path != "layers/mlp_norm")
    text = (
        *shared,
        plain(HF_LAYER + "pre_feedforward_layernorm.weight", "layers/mlp_norm", D),
        plain(HF_LAYER + "post_attention_layernorm.weight", "layers/attention_post_norm", D),
        plain(HF_LAYER + "post_feedforward_layernorm.weight", "layers/mlp_post_norm", D),
        *hf_head_norms(config),
    )
    if config.vision is None:
        return text
    return (
        *renamed(text, "language_model.model."),
        *siglip_weights(config.vision, "vision_tower.vision_model."),
        *pooled_projector(config.vision, "multi_modal_projector."),
    )
