"""GGUF metadata -> DecoderConfig, for all families."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from distflow_jax.models.decoder_config import (
    MOST_LAYERS,
    DecoderConfig,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_table_scale,
)
from distflow_jax.models.families.hf_config import refuse_others
from distflow_jax.parsing.checked_fields import (
    COUNT,
    NUMBER,
    NUMBER_OR_FLAG,
    POSITIVE,
    check_fields,
    integer_up_to,
)
from distflow_jax.parsing.one_line import shown

# keys below the architecture's name; the others are counts
_KINDS = {
    **dict.fromkeys(("rope.freq_base", "attention.layer_norm_rms_epsilon"), POSITIVE),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), POSITIVE),
    **dict.fromkeys(("rope.scaling.factor", "rope.scaling.yarn_log_multiplier"), NUMBER),
    **dict.fromkeys(("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), NUMBER),
    "block_count": integer_up_to(MOST_LAYERS),
    "expert_weights_norm": NUMBER_OR_FLAG,
}
# other keys that are read; "finetuned" says where factors come from
_READ = ("rope.dimension_count", "rope.scaling.type", "rope.scaling.original_context_length")
_READ += ("rope.scaling.finetuned",)
_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")  # of a mixture


def decoder_from_gguf(
    family: str,
    fields: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_freqs: np.ndarray | None,
    *,
    mixture: bool,
    **switches: Any,
) -> DecoderConfig:
    """Config of a GGUF file's metadata; raises ValueError for models that are not supported.

    Embeddings are tied if the file has no `output.weight`.

    Args:
      fields: metadata; keys of the network begin with the name of the architecture.
      rope_freqs: the file's tensor of that name [H/2], divisors of the rotary frequencies.
      mixture: whether layers have experts.
      switches: fields of DecoderConfig that are on in this family.
    """
    prefix = fields["general.architecture"]
    number = functools.partial(_number, fields, prefix)
    if mixture:
        switches |= {
            "num_experts": number("expert_count"),
            "experts_per_token": number("expert_used_count"),
            "norm_topk": bool(number("expert_weights_norm", True)),
        }
    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ValueError(
                f"{prefix}.{key} {number(key)} other than the head dim {head_dim} is not supported"
            )
    theta = float(number("rope.freq_base", 10_000.0))
    kind = fields.get(f"{prefix}.rope.scaling.type", "none")
    if not isinstance(kind, str):
        raise ValueError(f"{prefix}.rope.scaling.type must be text, got {shown(kind)}")
    scaling, positions = _rope_scaling(number, kind, rope_freqs, theta)
    own = {key: fields[key] for key in fields if key.startswith(f"{prefix}.")}
    read = {f"{prefix}.{key}" for key in (*_KINDS, *_READ, *(_EXPERTS if mixture else ()))}
    # a window that is no shorter than the longest sequence limits nothing
    window = max(positions, number("attention.sliding_window", positions))
    refuse_others("a GGUF", own, read, {f"{prefix}.attention.sliding_window": window})
    return DecoderConfig(
        family=family,
        vocab_size=number("vocab_size", len(fields.get("tokenizer.ggml.tokens", ())) or None),
        hidden_size=hidden,
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_size=number("expert_feed_forward_length" if mixture else "feed_forward_length"),
        rope_theta=theta,
        rope_scaling=scaling,
        # float32 in the file, where 1e-5 is 9.999999747e-06
        norm_eps=float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        tie_embeddings="output.weight" not in tensor_names,
        max_position=positions,
        **switches,
    )


def _number(fields: Mapping[str, Any], prefix: str, key: str, default: Any = None) -> Any:
    value = fields.get(f"{prefix}.{key}", default)
    if value is None:
        raise ValueError(f"GGUF metadata lacks {prefix}.{key}")
    if not isinstance(value, int | float):
        raise ValueError(f"{prefix}.{key} differs from layer to layer, which is not supported")
    check_fields({key: value}, {key: _KINDS.get(key, COUNT)}, f"GGUF metadata: {prefix}")
    return value


def _rope_scaling(
    number: Callable[..., Any], kind: str, rope_freqs: np.ndarray | None, theta: float
) -> tuple[RopeScaling | None, int]:
    """The rope scaling of `kind`, and the longest sequence in tokens."""
    positions = number("context_length")
    if kind == "yarn":
        scaling = _yarn(number, positions)
        return scaling, max(positions, scaling.max_position)
    if number("rope.scaling.factor", float(kind == "none")) == 1:
        original = number("rope.scaling.original_context_length", 8192)
        return _llama3(rope_freqs, theta, int(original)), positions
    raise ValueError(
        f"rope scaling {kind!r} is not supported, only Llama 3's rope_freqs and 'yarn'"
    )


def _yarn(number: Callable[..., float], positions: int) -> YarnScaling:
    """YaRN scaling; llama.cpp's own attention factors multiply the usual table scale."""
    factor = float(number("rope.scaling.factor"))
    log_weight = number("rope.scaling.yarn_log_multiplier", 0.0)
    if log_weight:
        raise ValueError(
            f"rope.scaling.yarn_log_multiplier={log_weight:g} is not supported, only 0"
        )
    extra = number("rope.scaling.attn_factor", 1.0) * number("rope.scaling.yarn_attn_factor", 1.0)
    return YarnScaling(
        factor,
        int(number("rope.scaling.original_context_length", positions)),
        float(number("rope.scaling.yarn_beta_fast", YarnScaling.beta_fast)),
        float(number("rope.scaling.yarn_beta_slow", YarnScaling.beta_slow)),
        None if extra == 1 else extra * yarn_table_scale(factor),
    )


def _llama3(rope_freqs: np.ndarray | None, theta: float, original: int) -> Llama3Scaling | None:
    """The Llama 3 scaling with the divisors `rope_freqs`, which are all that the file has of it."""
    if rope_freqs is None or np.all(rope_freqs == 1):
        return None
    scaling = Llama3Scaling(factor=float(rope_freqs.max()), original_max_position=original)
    if not np.allclose(rope_divisors(scaling, theta, len(rope_freqs)), rope_freqs, rtol=1e-4):
        raise ValueError(f"rope_freqs.weight does not hold the divisors of Llama 3's {scaling}")
    return scaling


def rope_divisors(scaling: Llama3Scaling, theta: float, half: int) -> np.ndarray:
    """Llama 3's divisors of the `half` = H/2 rotary frequencies, float64 [H/2].

    1 below the wavelength original / high, `factor` above original / low, smooth between.
    """
    wavelength = 2 * np.pi * theta ** (np.arange(half) / half)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling.factor + smooth)
