"""Names and shapes of the families' common tensors, in Hugging Face's and in GGUF's files.

D width, N query heads, K key-value heads, H head dim, F MLP width, V vocabulary, E experts.
"""

import dataclasses

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families.name_map import Weight

EMBEDDING, HF_HEAD = "embed/embedding", "lm_head.weight"
HF_LAYER, GGUF_LAYER = "model.layers.{layer}.", "blk.{layer}."

# buffers of old checkpoints, and tables that follow from the config
HF_IGNORED = (r"rotary_emb\.inv_freq$", r"rotary_pos_emb\.inv_freq$", r"embeddings\.position_ids$")
GGUF_IGNORED = (r"^rope_freqs\.weight$", r"\.attn_rot_embd\.weight$")


def hf_decoder(config: DecoderConfig, mlp: tuple[Weight, ...] | None = None) -> tuple[Weight, ...]:
    """Tensors of all families in a Hugging Face checkpoint; `mlp` replaces those of a dense MLP."""
    D, N, K, H, F, V = dims(config)
    layer = HF_LAYER
    dense = (
        transposed(layer + "mlp.gate_proj.weight", "layers/gate", F, D),
        transposed(layer + "mlp.up_proj.weight", "layers/up", F, D),
        transposed(layer + "mlp.down_proj.weight", "layers/down", D, F),
    )
    weights = (
        plain("model.embed_tokens.weight", EMBEDDING, V, D),
        plain(layer + "input_layernorm.weight", "layers/attention_norm", D),
        heads_in(layer + "self_attn.q_proj.weight", "layers/query", D, N, H),
        heads_in(layer + "self_attn.k_proj.weight", "layers/key", D, K, H),
        heads_in(layer + "self_attn.v_proj.weight", "layers/value", D, K, H),
        heads_out(layer + "self_attn.o_proj.weight", "layers/output", D, N, H),
        plain(layer + "post_attention_layernorm.weight", "layers/mlp_norm", D),
        *(dense if mlp is None else mlp),
        plain("model.norm.weight", "final_norm", D),
    )
    if config.tie_embeddings:
        return weights
    return (*weights, transposed(HF_HEAD, "head", V, D))


def hf_experts(
    config: DecoderConfig, block: str, gate: str, up: str, down: str
) -> tuple[Weight, ...]:
    """Tensors of a mixture in a Hugging Face checkpoint; arguments are the names of its modules."""
    D, _, _, _, F, _ = dims(config)
    block = HF_LAYER + block
    matrices = (
        transposed(f"{block}.experts.{{expert}}.{gate}.weight", "layers/gate", F, D),
        transposed(f"{block}.experts.{{expert}}.{up}.weight", "layers/up", F, D),
        transposed(f"{block}.experts.{{expert}}.{down}.weight", "layers/down", D, F),
    )
    return (
        transposed(f"{block}.gate.weight", "layers/router", config.num_experts, D),
        *(dataclasses.replace(weight, experts=config.num_experts) for weight in matrices),
    )


def hf_head_norms(config: DecoderConfig) -> tuple[Weight, ...]:
    """The norms of each head's query and key in a Hugging Face checkpoint."""
    return (
        plain(HF_LAYER + "self_attn.q_norm.weight", "layers/query_norm", config.head_dim),
        plain(HF_LAYER + "self_attn.k_norm.weight", "layers/key_norm", config.head_dim),
    )


def joined_experts(block: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """Tensors that transformers 5 makes of all experts of a layer, and their parts in order.

    It writes them with `save_original_format=False`. Arguments are those of hf_experts.
    """
    whole, part = HF_LAYER + "mlp.experts.", f"{HF_LAYER}{block}.experts.{{expert}}."
    return {
        whole + "gate_up_proj": (f"{part}{gate}.weight", f"{part}{up}.weight"),
        whole + "down_proj": (f"{part}{down}.weight",),
    }


def gguf_decoder(
    config: DecoderConfig, mlp: tuple[Weight, ...] | None = None, *, interleaved: bool
) -> tuple[Weight, ...]:
    """Tensors of all families in a GGUF file; `mlp` replaces those of a dense MLP.

    Shapes are in NumPy's order, the reverse of the file's. `interleaved`: query and key are in
    interleaved rotary order. llama.cpp rotates neighbouring channels for Llama only; its Qwen2 and
    Qwen3 rotate halves, as in Hugging Face's files.
    """
    D, N, K, H, F, V = dims(config)
    layer = GGUF_LAYER
    rotary = rotary_heads_in if interleaved else heads_in
    dense = (
        transposed(layer + "ffn_gate.weight", "layers/gate", F, D),
        transposed(layer + "ffn_up.weight", "layers/up", F, D),
        transposed(layer + "ffn_down.weight", "layers/down", D, F),
    )
    weights = (
        plain("token_embd.weight", "embed/embedding", V, D),
        plain(layer + "attn_norm.weight", "layers/attention_norm", D),
        rotary(layer + "attn_q.weight", "layers/query", D, N, H),
        rotary(layer + "attn_k.weight", "layers/key", D, K, H),
        heads_in(layer + "attn_v.weight", "layers/value", D, K, H),
        heads_out(layer + "attn_output.weight", "layers/output", D, N, H),
        plain(layer + "ffn_norm.weight", "layers/mlp_norm", D),
        *(dense if mlp is None else mlp),
        plain("output_norm.weight", "final_norm", D),
    )
    if config.tie_embeddings:
        return weights
    return (*weights, transposed("output.weight", "head", V, D))


def gguf_experts(config: DecoderConfig) -> tuple[Weight, ...]:
    """Tensors of a mixture in a GGUF file, one for all experts of a layer."""
    D, _, _, _, F, _ = dims(config)
    layer, count = GGUF_LAYER, config.num_experts
    return (
        transposed(layer + "ffn_gate_inp.weight", "layers/router", count, D),
        transposed_experts(layer + "ffn_gate_exps.weight", "layers/gate", count, F, D),
        transposed_experts(layer + "ffn_up_exps.weight", "layers/up", count, F, D),
        transposed_experts(layer + "ffn_down_exps.weight", "layers/down", count, D, F),
    )


def gguf_head_norms(config: DecoderConfig) -> tuple[Weight, ...]:
    """The norms of each head's query and key in a GGUF file."""
    return (
        plain(GGUF_LAYER + "attn_q_norm.weight", "layers/query_norm", config.head_dim),
        plain(GGUF_LAYER + "attn_k_norm.weight", "layers/key_norm", config.head_dim),
    )


def dims(config: DecoderConfig) -> tuple[int, int, int, int, int, int]:
    """(D, N, K, H, F, V) of this file's legend."""
    return (
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.mlp_size,
        config.vocab_size,
    )


def plain(source: str, path: str, *shape: int) -> Weight:
    """The unchanged tensor."""
    return Weight(source, path, shape, shape, tuple(range(len(shape))), shape)


def transposed(source: str, path: str, rows: int, columns: int) -> Weight:
    """[rows, columns] -> [columns, rows]."""
    return Weight(source, path, (rows, columns), (rows, columns), (1, 0), (columns, rows))


def transposed_experts(source: str, path: str, experts: int, rows: int, columns: int) -> Weight:
    """[experts, rows, columns] -> [experts, columns, rows]."""
    shape = (experts, rows, columns)
    return Weight(source, path, shape, shape, (0, 2, 1), (experts, columns, rows))


def head_vectors(source: str, path: str, heads: int, head_dim: int) -> Weight:
    """[heads * head_dim] -> [heads, head_dim]."""
    split = (heads, head_dim)
    return Weight(source, path, (heads * head_dim,), split, (0, 1), split)


def heads_in(source: str, path: str, width: int, heads: int, head_dim: int) -> Weight:
    """[heads * head_dim, width] -> [width, heads, head_dim]."""
    split = (heads, head_dim, width)
    return Weight(
        source, path, (heads * head_dim, width), split, (2, 0, 1), (width, heads, head_dim)
    )


def rotary_heads_in(source: str, path: str, width: int, heads: int, head_dim: int) -> Weight:
    """As heads_in, for rows in interleaved rotary order (0, H/2, 1, H/2 + 1, ...)."""
    split = (heads, head_dim // 2, 2, width)
    return Weight(
        source, path, (heads * head_dim, width), split, (3, 0, 2, 1), (width, heads, head_dim)
    )


def heads_out(source: str, path: str, width: int, heads: int, head_dim: int) -> Weight:
    """[width, heads * head_dim] -> [heads, head_dim, width]."""
    split = (width, heads, head_dim)
    return Weight(
        source, path, (width, heads * head_dim), split, (1, 2, 0), (heads, head_dim, width)
    )
