"""Hugging Face's `config.json` <-> DecoderConfig, for all families."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from distflow_jax.models.decoder_config import (
    MOST_LAYERS,
    DecoderConfig,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_table_scale,
)
from distflow_jax.parsing.checked_fields import (
    COUNT,
    FLAG,
    INTEGERS,
    NUMBER,
    OBJECT,
    POSITIVE,
    SIZE,
    TEXT,
    TEXTS,
    check_fields,
    integer_up_to,
)
from distflow_jax.parsing.one_line import one_line, shown

# DecoderConfig's fields and Hugging Face's names of the same numbers.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_MLP_SIZE = "intermediate_size"
# Every key that is read, in any family; it means the same in the others.
_KINDS = {
    **dict.fromkeys((*_SIZES.values(), _MLP_SIZE, "moe_intermediate_size"), COUNT),
    "num_hidden_layers": integer_up_to(MOST_LAYERS),
    **dict.fromkeys(
        ("num_key_value_heads", "head_dim", "max_position_embeddings"), COUNT.or_null()
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), SIZE),
    **dict.fromkeys(("sliding_window", "max_window_layers", "decoder_sparse_step"), SIZE.or_null()),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), SIZE.or_null()),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), POSITIVE.or_null()),
    **dict.fromkeys(("rms_norm_eps", "query_pre_attn_scalar"), POSITIVE),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "text_config"), OBJECT.or_null()),
    "model_type": TEXT,
    "layer_types": TEXTS.or_null(),
    "tie_word_embeddings": FLAG.or_null(),
    "use_sliding_window": FLAG.or_null(),
    "norm_topk_prob": FLAG.or_null(),
}
_ROPE_KINDS = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    **dict.fromkeys(
        ("factor", "rope_theta", "attention_factor", "attn_factor"), POSITIVE.or_null()
    ),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), NUMBER.or_null()),
    "original_max_position_embeddings": COUNT.or_null(),
    "truncate": FLAG,
    "mrope_section": INTEGERS,
}
FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers that are supported
# keys that each type of rope reads, and all of them; "finetuned" says where factors come from
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate")
    + ("mscale", "mscale_all_dim", "attn_factor"),
}
_EVERY_ROPE = ("rope_type", "type", "rope_theta", "original_max_position_embeddings", "finetuned")
# words in names of keys that change what a network computes, in any of transformers' families
_WORDS = re.compile(
    r"bias|_cap$|soft_?cap|clip|clamp|multiplier|scal|mup|norm|window|sliding|chunk|rope|rotary|"
    r"alibi|causal|bidirection|sink|residual|parallel_(attn|block)|expert|shared|group|topk|top_k_|"
    r"interleave|sparse|dense|only_layers|pattern|interval|_every|temperature_|_temperature|"
    r"^original_|position_embedding_type|(attention|attn)_type|"
    r"(^|_)(act|activation|gate|gated|gating|skip)(_|$)"
)
# and words in names of keys for training alone
_TRAINING = re.compile(r"(^|_)init|dropout|loss|coef|jitter|gradient|output_router_logits")
_ALWAYS = re.compile(r"is_causal$|\.causal$|use_rope$")  # what every network here has
_ANY = re.compile("")
_NOTHING = (None, 0, "", [], {})  # values with which such a key changes nothing
_ONE = re.compile(r"factor|multiplier|scal|group|step|interval|ratio|gating")  # and 1 with these
# such keys that are read in all families, and those of mixtures
_COMMON = ("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "use_sliding_window")
_COMMON += ("sliding_window", "max_window_layers", "layer_types")
EXPERTS = ("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob")
# DecoderConfig's activations and Hugging Face's names of them.
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
# fields of DecoderConfig that the family fixes, and fields of families with windows only
_SWITCHES = ("attention_bias", "qk_norm", "activation", "post_norms", "norm_offset", "embed_scale")
_NUMBERS = ("sliding_window", "full_every", "rope_local_theta", "rope_factor", "query_scalar")


def check_hf_config(raw: Mapping[str, Any], place: str) -> None:
    """Raises ValueError, which begins with `place`, for a value of a type that its key cannot have.

    Checks the keys of all families, those of rope scalings and of a text model inside.
    """
    check_fields(raw, _KINDS, place)
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key) or {}
        check_fields(rope, _ROPE_KINDS, f"{place}: {key}")
        for name, inner in rope.items():  # Gemma 3 has one by type of layer
            if isinstance(inner, Mapping):
                check_fields(inner, _ROPE_KINDS, f"{place}: {key}.{one_line(name)}")
            elif name.endswith("_attention") and inner is not None:
                raise ValueError(f"{place}: {key}.{name} must be an object, got {shown(inner)}")
    new, old = (raw.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    thetas = {part["rope_theta"] for part in (raw, new, old) if part.get("rope_theta")}
    if len(thetas) > 1 or (new and any(new.get(key) != value for key, value in old.items())):
        raise ValueError(
            f"{place}: rope_parameters={shown(new)}, rope_scaling={shown(old)} and rope_theta="
            f"{raw.get('rope_theta')} say different things: keep one of them"
        )
    if raw.get("text_config"):
        check_hf_config(raw["text_config"], f"{place}: text_config")


def decoder_from_hf(
    family: str,
    raw: Mapping[str, Any],
    *,
    read: Collection[str] = (),
    head_dim: int | None = None,
    max_position: int,
    mlp_size: str = _MLP_SIZE,
    **switches: Any,
) -> DecoderConfig:
    """Config of a `config.json`; raises ValueError for features that are not supported.

    Args:
      read: keys of the file that the family reads itself.
      head_dim: default if the file has none; None: hidden_size / num_attention_heads.
      max_position: default if the file has none, in tokens.
      mlp_size: the file's key of the MLP's size.
      switches: fields of DecoderConfig that this family sets.
    """
    if raw.get("quantization_config"):
        raise ValueError("quantised Hugging Face weights are not supported: use the original ones")
    activation = _ACTIVATIONS[switches.get("activation", "silu")]
    if "full_every" not in switches:
        _refuse_sliding_windows(family, raw)
    fixed = {key: switches.get(key) for key in _SWITCHES}
    fixed |= {"hidden_act": activation, "hidden_activation": activation}
    fixed["use_qk_norm"] = fixed["qk_norm"]  # Qwen3-Coder's files have it; transformers does not
    refuse_others(family, raw, {*_COMMON, *read}, fixed)
    sizes = _SIZES | {"mlp_size": mlp_size}
    missing = [key for key in sizes.values() if key not in raw]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads={heads} is not divisible by "
            f"num_key_value_heads={kv_heads}: take both from the model's original file"
        )
    # Hugging Face 5 moved rope_theta and rope_scaling into rope_parameters.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    positions = raw.get("max_position_embeddings") or max_position
    scaling = _scaling_from_hf(family, rope, positions)
    if isinstance(scaling, YarnScaling):
        # Qwen's files have the original length in max_position_embeddings
        positions = max(positions, scaling.max_position)
    return DecoderConfig(
        family=family,
        **{field: raw[key] for field, key in sizes.items()},
        num_kv_heads=kv_heads,
        head_dim=raw.get("head_dim") or head_dim or raw["hidden_size"] // heads,
        rope_theta=float(theta),
        rope_scaling=scaling,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_position=positions,
        **switches,
    )


def refuse_others(
    family: str,
    raw: Mapping[str, Any],
    read: Collection[str],
    fixed: Mapping[str, Any],
    words: re.Pattern[str] = _WORDS,
) -> None:
    """Raises ValueError for a key that would change the network, and that nothing here reads.

    Args:
      raw: keys and values of a file.
      read: keys that are read.
      fixed: values that the family has whatever a file says.
      words: what names of keys contain that change a network.
    """
    for key, value in raw.items():
        if key in read or _TRAINING.search(key) or not words.search(key) or value is None:
            continue
        always = bool(_ALWAYS.search(key))
        one = value == 1 and value is not True and _ONE.search(key)
        if value == (always or fixed.get(key)) or (not always and (value in _NOTHING or one)):
            continue
        raise ValueError(
            f"{family} with {one_line(key)}={shown(value)} is not supported: nothing here "
            "would change by it; remove it from the file if the model does without it"
        )


def text_from_hf(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the text model inside an image-text model's `config.json`.

    `tie_word_embeddings` stood in both places over the years: true in one of them is true.
    """
    given = raw.get("text_config") or {}
    text = {**defaults, **given}
    flags = [part.get("tie_word_embeddings") for part in (raw, given)]
    if flags != [None, None]:
        text["tie_word_embeddings"] = any(flags)
    if "quantization_config" in raw:
        text["quantization_config"] = raw["quantization_config"]
    return text


def sections_from_hf(
    family: str, raw: Mapping[str, Any], *, theta: float
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """rope_sections of a text model's keys, and the keys with a plain rope; `theta` by default."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    sections = rope.get("mrope_section") or ()
    kind = rope.get("rope_type", rope.get("type", "default"))
    interleaved = ("mrope_interleaved",) if family == "qwen3_vl" else ()
    check_rope(family, rope, ("mrope_section", *interleaved))
    if kind not in ("default", "mrope") or not sections:
        raise ValueError(
            f"{family} with rope type {kind!r} and mrope_section={list(sections)} is not "
            "supported, only 'default' with three sections"
        )
    plain = {"rope_theta": rope.get("rope_theta") or raw.get("rope_theta") or theta}
    return tuple(sections), {**raw, "rope_parameters": None, "rope_scaling": None, **plain}


def sections_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of sections_from_hf; ValueError for scalings that these families' files lack."""
    if config.rope_scaling is not None:
        raise ValueError(
            f"a {config.family} model with {config.rope_scaling} has no form in Hugging Face's "
            "files"
        )
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": list(config.rope_sections)}
    rope |= {"mrope_interleaved": True} if config.rope_interleaved else {"type": "default"}
    return {"rope_scaling": rope}


def check_rope(family: str, rope: Mapping[str, Any], read: Collection[str] = ()) -> None:
    """Raises ValueError for keys of a rope that its type does not read; `read` are read anyway."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = (*_EVERY_ROPE, *_ROPE_KEYS.get(kind, rope), *read)
    refuse_others(f"{family} with a rope of type {kind!r}", rope, keys, {}, _ANY)


def _scaling_from_hf(family: str, rope: Mapping[str, Any], positions: int) -> RopeScaling | None:
    check_rope(family, rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "llama3":
        return _llama3_from_hf(rope)
    if kind == "yarn":
        return _yarn_from_hf(rope, positions)
    raise ValueError(f"rope type {kind!r} is not supported, only 'default', 'llama3' and 'yarn'")


def _llama3_from_hf(rope: Mapping[str, Any]) -> Llama3Scaling:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if rope.get(key) is None]
    if missing:
        raise ValueError(f"the llama3 rope scaling of config.json lacks {', '.join(missing)}")
    factor, low, high, original = (rope[key] for key in keys)
    return Llama3Scaling(float(factor), float(low), float(high), int(original))


def _yarn_from_hf(rope: Mapping[str, Any], positions: int) -> YarnScaling:
    """YaRN scaling with transformers' defaults.

    The original length defaults to `positions`, the factor to `positions` / original length.
    """
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if original is None and factor is None:
        raise ValueError("the yarn rope scaling of config.json lacks factor")
    original = original or positions
    factor = factor or positions / original
    attention = rope.get("attention_factor")
    weights = rope.get("mscale"), rope.get("mscale_all_dim")
    if attention is None and all(weights):
        over, under = (yarn_table_scale(factor, weight) for weight in weights)
        attention = over / under
    if extra := rope.get("attn_factor"):  # multiplies the tables, as in vLLM and llama.cpp
        attention = extra * (attention or yarn_table_scale(factor))
    return YarnScaling(
        float(factor),
        int(original),
        float(rope.get("beta_fast") or YarnScaling.beta_fast),
        float(rope.get("beta_slow") or YarnScaling.beta_slow),
        None if attention is None else float(attention),
        bool(rope.get("truncate", YarnScaling.truncate)),
    )


def _scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    same = {
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
    if isinstance(scaling, Llama3Scaling):
        bands = ("low_freq_factor", "high_freq_factor")
        return {"rope_type": "llama3", **same, **{key: getattr(scaling, key) for key in bands}}
    # defaults are left out, because some libraries support only the first two keys
    optional = ("beta_fast", "beta_slow", "attention_factor", "truncate")
    own = {key: getattr(scaling, key) for key in optional}
    changed = {key: value for key, value in own.items() if value != getattr(YarnScaling, key)}
    return {"rope_type": "yarn", **same, **changed}


def _refuse_sliding_windows(family: str, raw: Mapping[str, Any]) -> None:
    """Raises ValueError if a layer's window is shorter than the longest sequence.

    transformers' defaults, with `use_sliding_window`, are a window of 4,096 tokens from the 28th
    layer on.
    """
    types = raw.get("layer_types") or ()
    if others := {*types} - {FULL, SLIDING}:
        raise ValueError(f"{family} with layer_types of {shown(min(others))} is not supported")
    # files of families whose windows have no switch have a window, or null
    switch = raw.get("use_sliding_window", bool(raw.get("sliding_window")))
    window = raw.get("sliding_window", 4096)
    if window is None or not (switch or SLIDING in types):
        return
    first = raw.get("max_window_layers")
    if first is None:
        first = 28 if "use_sliding_window" in raw else 0
    sliding = SLIDING in types if types else first < raw.get("num_hidden_layers", 0)
    if sliding and window < raw.get("max_position_embeddings", window + 1):
        raise ValueError(
            f"{family} with use_sliding_window is not supported if windows are shorter than "
            f"max_position_embeddings (sliding_window={window}, max_window_layers={first}, "
            f"num_hidden_layers={raw.get('num_hidden_layers')}): set max_position_embeddings to "
            f"{window}, or use a model without windows"
        )


def experts_from_hf(raw: Mapping[str, Any]) -> dict[str, int]:
    """num_experts and experts_per_token of a `config.json`; ValueError if it lacks them."""
    # transformers 5 writes the second key for all families
    counts = [raw[key] for key in ("num_experts", "num_local_experts") if key in raw]
    if not counts or "num_experts_per_tok" not in raw:
        raise ValueError(
            "config.json lacks num_experts (or num_local_experts), num_experts_per_tok"
        )
    return {"num_experts": counts[0], "experts_per_token": raw["num_experts_per_tok"]}


def decoder_to_hf(
    config: DecoderConfig,
    architecture: str,
    *,
    mixture: bool = False,
    windows: bool = False,
    **switches: Any,
) -> dict[str, Any]:
    """`config.json` of a config, in a form that transformers 4 and 5 both read.

    Raises ValueError for configs that the family's files cannot express.

    Args:
      architecture: transformers' class.
      mixture: whether this family's layers have experts; the caller adds their keys.
      windows: whether layers may have windows; the caller adds their keys.
      switches: fields of DecoderConfig that are on in this family; the others must be off.
    """
    for field in _SWITCHES if windows else (*_SWITCHES, *_NUMBERS):
        if getattr(config, field) != switches.get(field, getattr(DecoderConfig, field)):
            raise ValueError(
                f"a {config.family} model with {field}={getattr(config, field)} has no form in "
                "Hugging Face's files"
            )
    if bool(config.num_experts) != mixture:
        raise ValueError(
            f"a {config.family} model with num_experts={config.num_experts} has no form in Hugging "
            "Face's files"
        )
    scaling = config.rope_scaling
    return {
        "architectures": [architecture],
        "model_type": config.family,
        **{key: getattr(config, field) for field, key in _SIZES.items()},
        _MLP_SIZE: config.mlp_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else _scaling_to_hf(scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
    }
