"""Llama family: Hugging Face's and GGUF's metadata -> DecoderConfig, and both tables of names.

D width, N query heads, K key-value heads, H head dim, F MLP width, V vocabulary.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from distflow_jax.models.config import DecoderConfig, RopeScaling
from distflow_jax.models.weights.names import Weight, unstacked_arrays

# Buffers that old checkpoints carry and rotary tables that the config already holds.
HF_IGNORED = (r"rotary_emb\.inv_freq$",)
GGUF_IGNORED = (r"^rope_freqs\.weight$", r"\.attn_rot_embd\.weight$")


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of a Hugging Face `config.json`. ValueError where the network has more than ours."""
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ValueError(f"llama with {key} is not supported: the network has no biases")
    if raw.get("quantization_config"):
        raise ValueError("quantised Hugging Face weights are not supported: take the original ones")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"llama with hidden_act {activation!r} is not supported, only 'silu'")
    missing = [
        key
        for key in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
        )
        if key not in raw
    ]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    heads = raw["num_attention_heads"]
    # Hugging Face 5 moved rope_theta and rope_scaling into rope_parameters.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    return DecoderConfig(
        family="llama",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        mlp_size=raw["intermediate_size"],
        rope_theta=float(theta),
        rope_scaling=_scaling_from_hf(rope),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_position=raw.get("max_position_embeddings", 2048),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` of a config: config_from_hf(config_to_hf(c)) == c.

    rope_theta and rope_scaling stand where all releases of transformers look for them.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_to_hf(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
    }


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def _scaling_from_hf(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope type {kind!r} is not supported, only 'default' and 'llama3'")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in rope]
    if missing:
        raise ValueError(f"the llama3 rope scaling of config.json lacks {', '.join(missing)}")
    factor, low, high, original = (rope[key] for key in keys)
    return RopeScaling(float(factor), float(low), float(high), int(original))


def config_from_gguf(
    fields: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_freqs: np.ndarray | None = None,
) -> DecoderConfig:
    """Config of a GGUF file's metadata.

    `rope_freqs` [H/2] is its tensor of that name: what each rotary frequency is divided by.
    Embeddings are tied where there is no `output.weight`.
    """

    def number(key, default=None):
        value = fields.get(f"llama.{key}", default)
        if value is None:
            raise ValueError(f"GGUF metadata lacks llama.{key}")
        if not isinstance(value, int | float):
            raise ValueError(f"llama.{key} differs from layer to layer, which is not supported")
        return value

    if number("expert_count", 0):
        raise ValueError(f"mixture of {number('expert_count')} experts is not supported")
    biased = [name for name in tensor_names if name.endswith(".bias")]
    if biased:
        raise ValueError(f"llama with biases ({biased[0]}) is not supported")
    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ValueError(
                f"llama.{key} {number(key)} other than the head dim {head_dim} is not supported"
            )
    kind = fields.get("llama.rope.scaling.type", "none")
    if kind != "none" and number("rope.scaling.factor", 0) != 1:
        raise ValueError(f"rope scaling {kind!r} is not supported, only Llama 3's rope_freqs")
    theta = float(number("rope.freq_base", 10_000.0))
    return DecoderConfig(
        family="llama",
        vocab_size=number("vocab_size", len(fields.get("tokenizer.ggml.tokens", ())) or None),
        hidden_size=hidden,
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_size=number("feed_forward_length"),
        rope_theta=theta,
        rope_scaling=_scaling_from_gguf(rope_freqs, theta, fields),
        # The file holds float32: 1e-5 comes as 9.999999747e-06.
        norm_eps=float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        tie_embeddings="output.weight" not in tensor_names,
        max_position=number("context_length"),
    )


def _scaling_from_gguf(
    rope_freqs: np.ndarray | None, theta: float, fields: Mapping[str, Any]
) -> RopeScaling | None:
    """The Llama 3 scaling whose divisors are `rope_freqs`; the file keeps nothing else of it."""
    if rope_freqs is None or np.all(rope_freqs == 1):
        return None
    scaling = RopeScaling(
        factor=float(rope_freqs.max()),
        original_max_position=int(fields.get("llama.rope.scaling.original_context_length", 8192)),
    )
    if not np.allclose(rope_divisors(scaling, theta, len(rope_freqs)), rope_freqs, rtol=1e-4):
        raise ValueError(f"rope_freqs.weight holds other divisors than Llama 3's {scaling}")
    return scaling


def rope_divisors(scaling: RopeScaling, theta: float, half: int) -> np.ndarray:
    """What Llama 3 divides the `half` = H/2 rotary frequencies by, float64 [H/2].

    1 below the wavelength original / high, `factor` above original / low, smooth between.
    """
    wavelength = 2 * np.pi * theta ** (np.arange(half) / half)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def hf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a Hugging Face checkpoint."""
    D, N, K, H, F, V = _dims(config)
    layer = "model.layers.{layer}."
    weights = (
        _plain("model.embed_tokens.weight", "embed/embedding", V, D),
        _plain(layer + "input_layernorm.weight", "layers/attention_norm", D),
        _heads_in(layer + "self_attn.q_proj.weight", "layers/query", D, N, H),
        _heads_in(layer + "self_attn.k_proj.weight", "layers/key", D, K, H),
        _heads_in(layer + "self_attn.v_proj.weight", "layers/value", D, K, H),
        _heads_out(layer + "self_attn.o_proj.weight", "layers/output", D, N, H),
        _plain(layer + "post_attention_layernorm.weight", "layers/mlp_norm", D),
        _transposed(layer + "mlp.gate_proj.weight", "layers/gate", F, D),
        _transposed(layer + "mlp.up_proj.weight", "layers/up", F, D),
        _transposed(layer + "mlp.down_proj.weight", "layers/down", D, F),
        _plain("model.norm.weight", "final_norm", D),
    )
    if config.tie_embeddings:
        return weights
    return (*weights, _transposed("lm_head.weight", "head", V, D))


def hf_ignored(config: DecoderConfig) -> tuple[str, ...]:
    """Patterns of tensors that need no parameter: a tied model's second copy of the embedding."""
    return (*HF_IGNORED, r"^lm_head\.weight$") if config.tie_embeddings else HF_IGNORED


def gguf_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """Names and shapes of a GGUF file (in NumPy's order, the reverse of the file's)."""
    D, N, K, H, F, V = _dims(config)
    layer = "blk.{layer}."
    weights = (
        _plain("token_embd.weight", "embed/embedding", V, D),
        _plain(layer + "attn_norm.weight", "layers/attention_norm", D),
        _rotary_heads_in(layer + "attn_q.weight", "layers/query", D, N, H),
        _rotary_heads_in(layer + "attn_k.weight", "layers/key", D, K, H),
        _heads_in(layer + "attn_v.weight", "layers/value", D, K, H),
        _heads_out(layer + "attn_output.weight", "layers/output", D, N, H),
        _plain(layer + "ffn_norm.weight", "layers/mlp_norm", D),
        _transposed(layer + "ffn_gate.weight", "layers/gate", F, D),
        _transposed(layer + "ffn_up.weight", "layers/up", F, D),
        _transposed(layer + "ffn_down.weight", "layers/down", D, F),
        _plain("output_norm.weight", "final_norm", D),
    )
    if config.tie_embeddings:
        return weights
    return (*weights, _transposed("output.weight", "head", V, D))


def to_hf(config: DecoderConfig, path: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """One parameter -> the (name, tensor) pairs of a Hugging Face checkpoint."""
    return unstacked_arrays(hf_weights(config), path, array)


def _dims(config: DecoderConfig) -> tuple[int, int, int, int, int, int]:
    return (
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.mlp_size,
        config.vocab_size,
    )


def _plain(source: str, path: str, *shape: int) -> Weight:
    return Weight(source, path, shape, shape, tuple(range(len(shape))), shape)


def _transposed(source: str, path: str, rows: int, columns: int) -> Weight:
    return Weight(source, path, (rows, columns), (rows, columns), (1, 0), (columns, rows))


def _heads_in(source: str, path: str, width: int, heads: int, head_dim: int) -> Weight:
    """[heads * head_dim, width] -> [width, heads, head_dim]."""
    split = (heads, head_dim, width)
    return Weight(
        source, path, (heads * head_dim, width), split, (2, 0, 1), (width, heads, head_dim)
    )


def _rotary_heads_in(source: str, path: str, width: int, heads: int, head_dim: int) -> Weight:
    """As _heads_in, from rows in interleaved rotary order (0, H/2, 1, H/2 + 1, ...)."""
    split = (heads, head_dim // 2, 2, width)
    return Weight(
        source, path, (heads * head_dim, width), split, (3, 0, 2, 1), (width, heads, head_dim)
    )


def _heads_out(source: str, path: str, width: int, heads: int, head_dim: int) -> Weight:
    """[width, heads * head_dim] -> [heads, head_dim, width]."""
    split = (width, heads, head_dim)
    return Weight(
        source, path, (width, heads * head_dim), split, (1, 2, 0), (heads, head_dim, width)
    )
