"""Hugging Face's `vision_config` and `preprocessor_config.json` <-> VisionConfig."""

import math
from collections.abc import Mapping
from typing import Any

from distflow_jax.models.decoder_config import MOST_LAYERS
from distflow_jax.models.families.hf_config import refuse_others
from distflow_jax.models.vision.vision_config import VisionConfig
from distflow_jax.parsing.checked_fields import (
    COUNT,
    FLAG,
    INTEGERS,
    NUMBERS,
    OBJECT,
    POSITIVE,
    SIZE,
    TEXT,
    check_fields,
    integer_up_to,
)
from distflow_jax.parsing.one_line import shown

_CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
# VisionConfig's fields and the keys of `vision_config`, by family
_SIGLIP_KEYS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_size": "intermediate_size",
    "patch_size": "patch_size",
    "norm_eps": "layer_norm_eps",
}
_QWEN_KEYS = {
    "hidden_size": "hidden_size",
    "num_layers": "depth",
    "num_heads": "num_heads",
    "mlp_size": "intermediate_size",
    "patch_size": "patch_size",
    "merge": "spatial_merge_size",
}
_KEYS: Mapping[str, Mapping[str, str]] = {
    "smolvlm": _SIGLIP_KEYS,
    "gemma3": _SIGLIP_KEYS,
    "qwen2_5_vl": _QWEN_KEYS | {"tokens_per_second": "tokens_per_second"},
    "qwen3_vl": _QWEN_KEYS,
}
# transformers' defaults of keys that a file lacks
_SIGLIP_DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "smolvlm": _SIGLIP_DEFAULTS
    | {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
    },
    "gemma3": _SIGLIP_DEFAULTS
    | {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
    },
    "qwen2_5_vl": {
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "depth": 32,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
        "tokens_per_second": 4,
        "hidden_act": "silu",
    },
    "qwen3_vl": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "depth": 27,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
        "hidden_act": "gelu_pytorch_tanh",
    },
}
# VisionConfig's fields of what a picture is before it is cut
PICTURES: Mapping[str, Mapping[str, Any]] = {
    "siglip": {},
    "smolvlm": {"longest_edge": 4 * 364},
    "gemma3": {},
    "qwen2_5_vl": {**_CLIP, "least_pixels": 56 * 56, "most_pixels": 28 * 28 * 1280},
    "qwen3_vl": {"least_pixels": 256 * 256, "most_pixels": 4096 * 4096},
}
_KINDS = {
    **dict.fromkeys(
        (*_SIGLIP_KEYS.values(), *_QWEN_KEYS.values(), "image_size", "num_channels"), COUNT
    ),
    **dict.fromkeys(("temporal_patch_size", "window_size", "out_hidden_size"), COUNT),
    **dict.fromkeys(("num_hidden_layers", "depth"), integer_up_to(MOST_LAYERS)),
    **dict.fromkeys(("num_position_embeddings", "tokens_per_second"), COUNT),
    "layer_norm_eps": POSITIVE,
    "hidden_act": TEXT,
    **dict.fromkeys(("fullatt_block_indexes", "deepstack_visual_indexes"), INTEGERS),
}
_OUTER_KINDS = {
    "vision_config": OBJECT,
    **dict.fromkeys(("image_token_id", "vision_start_token_id", "vision_end_token_id"), SIZE),
    **dict.fromkeys(("image_token_index", "boi_token_index", "eoi_token_index"), SIZE),
    **dict.fromkeys(("scale_factor", "mm_tokens_per_image"), COUNT),
}
_PICTURE_KINDS = {
    **dict.fromkeys(("image_mean", "image_std"), NUMBERS.or_null()),
    **dict.fromkeys(("min_pixels", "max_pixels"), COUNT.or_null()),
    **dict.fromkeys(("size", "max_image_size"), OBJECT),
    "do_image_splitting": FLAG.or_null(),
}
PREPROCESSOR = "preprocessor_config"  # key of that file's content beside those of config.json
_ACTIVATION = {"gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}


def vision_from_hf(family: str, raw: Mapping[str, Any], width: int) -> VisionConfig:
    """The tower of a `config.json`, with features of `width`.

    Raises ValueError for a tower that is not supported.
    """
    check_fields(raw, _OUTER_KINDS, "config.json")
    given = raw.get("vision_config") or {}
    check_fields(given, _KINDS, "config.json: vision_config")
    own = {**DEFAULTS[family], **given}
    fields = {field: own[key] for field, key in _KEYS[family].items()}
    fields |= _geometry(family, raw, own)
    pictures = raw.get(PREPROCESSOR) or {}
    fields |= _picture(family, pictures, fields)
    fields |= _ids(family, raw)
    tower = VisionConfig(family=family, width=width, **fields)
    traits, rope = tower.traits, {"rope_theta": tower.rope_theta, "rope_type": "axial"}
    fixed = {"hidden_act": _ACTIVATION[traits.activation], "num_channels": 3, "in_channels": 3}
    fixed |= {"out_hidden_size": width, "temporal_patch_size": traits.frames}
    _check_same(f"{family} with vision_config", own, fixed)
    refuse_others(f"{family} with vision_config", own, _KINDS, {"rope_parameters": rope})
    _check_same(f"{family} with {PREPROCESSOR}.json", pictures, _pictures_like(tower))
    return tower


def _check_same(place: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if found.get(key) is not None and found[key] != value:
            raise ValueError(f"{place}: {key}={shown(found[key])} is not supported, only {value}")


def _pictures_like(tower: VisionConfig) -> dict[str, Any]:
    """Settings of transformers' image processor that must be those of the tower, or missing."""
    settings = preprocessor_to_hf(tower) | {"do_pan_and_scan": False}
    keys = ("do_resize", "do_rescale", "do_normalize", "do_pan_and_scan", "rescale_factor")
    keys += ("resample", "patch_size", "merge_size", "temporal_patch_size", "max_image_size")
    keys += ("size",) if tower.family == "gemma3" else ()
    return {key: settings[key] for key in keys if key in settings}


def _geometry(family: str, raw: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Grid, merge, windows and DeepStack."""
    if family == "qwen2_5_vl":
        window = own["window_size"] // own["spatial_merge_size"] // own["patch_size"]
        return {
            "window": window * own["spatial_merge_size"],
            "full_layers": tuple(n for n in own["fullatt_block_indexes"] if n < own["depth"]),
        }
    if family == "qwen3_vl":
        grid = math.isqrt(own["num_position_embeddings"])
        if grid**2 != own["num_position_embeddings"]:
            raise ValueError(
                f"config.json: num_position_embeddings={own['num_position_embeddings']} is not "
                "that of a square grid"
            )
        return {"grid": grid, "deepstack": tuple(own["deepstack_visual_indexes"])}
    grid = own["image_size"] // own["patch_size"]
    if family == "gemma3":
        side = math.isqrt(raw.get("mm_tokens_per_image", 256))
        return {"grid": grid, "merge": max(grid // max(side, 1), 1)}
    return {"grid": grid, "merge": raw.get("scale_factor", 2)}


def _picture(family: str, raw: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rules by which pictures are resized, from preprocessor_config.json or the family's."""
    check_fields(raw, _PICTURE_KINDS, "preprocessor_config.json")
    found = dict(PICTURES[family])
    found |= {name: tuple(raw[f"image_{name}"]) for name in _CLIP if raw.get(f"image_{name}")}
    size = raw.get("size") or {}
    check_fields(
        size, dict.fromkeys(("shortest_edge", "longest_edge"), COUNT.or_null()), "size of an image"
    )
    if family.startswith("qwen"):
        least = raw.get("min_pixels") or size.get("shortest_edge")
        most = raw.get("max_pixels") or size.get("longest_edge")
        found |= {"least_pixels": least} if least else {}
        found |= {"most_pixels": most} if most else {}
    if family == "smolvlm":
        if not raw:
            found["longest_edge"] = 4 * fields["grid"] * fields["patch_size"]
        elif raw.get("do_image_splitting") is False:
            found["longest_edge"] = 0
        elif size.get("longest_edge"):
            found["longest_edge"] = size["longest_edge"]
    return found


_ID_KEYS = {
    "smolvlm": {"image_token": ("image_token_id", 128_257)},
    "gemma3": {
        "image_token": ("image_token_index", 262_144),
        "start_token": ("boi_token_index", 255_999),
        "end_token": ("eoi_token_index", 256_000),
    },
    **dict.fromkeys(
        ("qwen2_5_vl", "qwen3_vl"),
        {
            "image_token": ("image_token_id", 151_655),
            "start_token": ("vision_start_token_id", 151_652),
            "end_token": ("vision_end_token_id", 151_653),
        },
    ),
}


def _ids(family: str, raw: Mapping[str, Any]) -> dict[str, int]:
    return {field: raw.get(key, value) for field, (key, value) in _ID_KEYS[family].items()}


def vision_to_hf(c: VisionConfig) -> dict[str, Any]:
    """Inverse of vision_from_hf: the keys of `config.json` beside those of the text model."""
    family = "smolvlm" if c.family == "siglip" else c.family
    model_type = {
        "smolvlm": "smolvlm_vision",
        "gemma3": "siglip_vision_model",
        "qwen2_5_vl": "qwen2_5_vl",
        "qwen3_vl": "qwen3_vl",
    }[family]
    tower = {"model_type": model_type}
    tower |= {key: getattr(c, field) for field, key in _KEYS[family].items()}
    tower |= {"hidden_act": _ACTIVATION[c.traits.activation]}
    outer = {
        key: getattr(c, field)
        for field, (key, _) in _ID_KEYS[family].items()
        if getattr(c, field) >= 0
    }
    if family == "qwen2_5_vl":
        tower |= {
            "window_size": c.window * c.patch_size,
            "fullatt_block_indexes": list(c.full_layers),
        }
    if family == "qwen3_vl":
        tower |= {
            "num_position_embeddings": c.grid**2,
            "deepstack_visual_indexes": list(c.deepstack),
        }
    if family.startswith("qwen"):
        tower |= {"out_hidden_size": c.width, "temporal_patch_size": c.traits.frames}
        tower |= {"in_channels": 3, "in_chans": 3}
        return outer | {"vision_config": tower}
    tower |= {"image_size": c.grid * c.patch_size}
    if family == "gemma3":
        tower |= {"vision_use_head": False}
        return outer | {"vision_config": tower, "mm_tokens_per_image": (c.grid // c.merge) ** 2}
    return outer | {"vision_config": tower, "scale_factor": c.merge}


def preprocessor_to_hf(c: VisionConfig) -> dict[str, Any]:
    """Content of `preprocessor_config.json`: how transformers resizes and cuts pictures."""
    settings: dict[str, Any] = {
        **dict.fromkeys(("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"), True),
        "image_mean": list(c.mean),
        "image_std": list(c.std),
        "rescale_factor": 1 / 255,
    }
    if c.family.startswith("qwen"):
        return settings | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "resample": 3,
            "size": {"shortest_edge": c.least_pixels, "longest_edge": c.most_pixels},
            "patch_size": c.patch_size,
            "merge_size": c.merge,
            "temporal_patch_size": c.traits.frames,
        }
    side = c.image_size
    if c.family == "gemma3":
        return settings | {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "size": {"height": side, "width": side},
            "image_seq_length": (c.grid // c.merge) ** 2,
            "do_pan_and_scan": None,
        }
    return settings | {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "resample": 1,
        "do_pad": True,
        "do_image_splitting": bool(c.longest_edge),
        "size": {"longest_edge": c.longest_edge or side},
        "max_image_size": {"longest_edge": side},
    }
