"""Names and shapes of the tensors of vision towers in Hugging Face's files.

D hidden, N heads, H head dim, F MLP width, P pixels of a patch's side, E width of what the
projector takes.
"""

import dataclasses
from collections.abc import Callable

from distflow_jax.models.families.name_map import Weight
from distflow_jax.models.families.tensors import (
    head_vectors,
    heads_in,
    heads_out,
    plain,
    transposed,
)
from distflow_jax.models.vision.vision_config import VISION, VisionConfig


def siglip_weights(c: VisionConfig, prefix: str) -> tuple[Weight, ...]:
    """Tensors of a SigLIP tower without its projector, whose names begin with `prefix`."""
    D, N, H, F, P = c.hidden_size, c.num_heads, c.head_dim, c.mlp_size, c.patch_size
    layer = prefix + "encoder.layers.{layer}."
    conv = Weight(
        prefix + "embeddings.patch_embedding.weight",
        "patch",
        (D, 3, P, P),
        (D, 3, P, P),
        (2, 3, 1, 0),
        (1, P * P * 3, D),
    )
    attention = [
        weight
        for name, file in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
        for weight in (
            heads_in(f"{layer}self_attn.{file}.weight", f"layers/{name}", D, N, H),
            head_vectors(f"{layer}self_attn.{file}.bias", f"layers/{name}_bias", N, H),
        )
    ]
    return _of_tower(
        c,
        conv,
        plain(prefix + "embeddings.patch_embedding.bias", "patch_bias", D),
        plain(prefix + "embeddings.position_embedding.weight", "position", c.grid**2, D),
        *_with_bias(layer + "layer_norm1", "layers/attention_norm", D),
        *attention,
        heads_out(layer + "self_attn.out_proj.weight", "layers/output", D, N, H),
        plain(layer + "self_attn.out_proj.bias", "layers/output_bias", D),
        *_with_bias(layer + "layer_norm2", "layers/mlp_norm", D),
        *_with_bias(layer + "mlp.fc1", "layers/up", F, D),
        *_with_bias(layer + "mlp.fc2", "layers/down", D, F),
        *_with_bias(prefix + "post_layernorm", "final_norm", D),
    )


def linear_projector(c: VisionConfig, source: str) -> tuple[Weight, ...]:
    """The matrix after a pixel shuffle."""
    return _of_tower(c, transposed(source, "merger/down", c.width, c.merged_size))


def pooled_projector(c: VisionConfig, prefix: str) -> tuple[Weight, ...]:
    """Norm and matrix after Gemma 3's pooling."""
    return _of_tower(
        c,
        plain(prefix + "mm_soft_emb_norm.weight", "merger/norm", c.hidden_size),
        plain(prefix + "mm_input_projection_weight", "merger/down", c.hidden_size, c.width),
    )


def qwen_weights(c: VisionConfig, prefix: str) -> tuple[Weight, ...]:
    """Tensors of Qwen's towers, whose names begin with `prefix`; mergers included."""
    D, N, H, F, P = c.hidden_size, c.num_heads, c.head_dim, c.mlp_size, c.patch_size
    E, W, frames = c.merged_size, c.width, c.traits.frames
    layer, gated = prefix + "blocks.{layer}.", c.traits.gated
    kernel = (D, 3, frames, P, P)
    conv = Weight(
        prefix + "patch_embed.proj.weight",
        "patch",
        kernel,
        kernel,
        (2, 3, 4, 1, 0),
        (frames, P * P * 3, D),
    )
    weights = [
        conv,
        _qkv(f"{layer}attn.qkv.weight", D, N, H),
        Weight(
            f"{layer}attn.qkv.bias",
            "layers/qkv_bias",
            (3 * D,),
            (3, N, H),
            (0, 1, 2),
            (3, N, H),
        ),
        heads_out(layer + "attn.proj.weight", "layers/output", D, N, H),
        plain(layer + "attn.proj.bias", "layers/output_bias", D),
    ]
    norm = _plain_norm if c.traits.rms else _with_bias
    weights += [
        *norm(layer + "norm1", "layers/attention_norm", D),
        *norm(layer + "norm2", "layers/mlp_norm", D),
    ]
    if gated:
        weights += _with_bias(layer + "mlp.gate_proj", "layers/gate", F, D)
    up, down = ("up_proj", "down_proj") if gated else ("linear_fc1", "linear_fc2")
    weights += _with_bias(f"{layer}mlp.{up}", "layers/up", F, D)
    weights += _with_bias(f"{layer}mlp.{down}", "layers/down", D, F)
    if c.traits.patch_bias:
        weights.append(plain(prefix + "patch_embed.proj.bias", "patch_bias", D))
    if c.traits.learned:
        weights.append(plain(prefix + "pos_embed.weight", "position", c.grid**2, D))
    names = ("ln_q", "mlp.0", "mlp.2") if c.traits.rms else ("norm", "linear_fc1", "linear_fc2")
    weights += _merger(norm, prefix + "merger.", "merger", names, (D, E, W))
    if c.deepstack:
        stack = prefix + "deepstack_merger_list.{layer}."
        mergers = _merger(_with_bias, stack, "deepstack", names, (E, E, W))
        weights += (dataclasses.replace(w, layers=len(c.deepstack)) for w in mergers)
    return _of_tower(c, *weights)


def _merger(
    norm: Callable[..., tuple[Weight, ...]],
    prefix: str,
    path: str,
    names: tuple[str, str, str],
    sizes: tuple[int, int, int],
) -> list[Weight]:
    """Norm and both products of a merger; `sizes` are those of norm, inner layer and output."""
    normed, inner, width = sizes
    first, up, down = names
    return [
        *norm(prefix + first, f"{path}/norm", normed),
        *_with_bias(prefix + up, f"{path}/up", inner, inner),
        *_with_bias(prefix + down, f"{path}/down", width, inner),
    ]


def _qkv(source: str, width: int, heads: int, head_dim: int) -> Weight:
    """[3 * heads * head_dim, width] -> [width, 3, heads, head_dim]."""
    split = (3, heads, head_dim, width)
    return Weight(
        source,
        "layers/qkv",
        (3 * heads * head_dim, width),
        split,
        (3, 0, 1, 2),
        (width, 3, heads, head_dim),
    )


def _with_bias(source: str, path: str, *shape: int) -> tuple[Weight, ...]:
    """A norm of one size, or a product [outputs, inputs], and its bias."""
    load = plain if len(shape) == 1 else transposed
    bias = plain(f"{source}.bias", f"{path}_bias", shape[0])
    return load(f"{source}.weight", path, *shape), bias


def _plain_norm(source: str, path: str, size: int) -> tuple[Weight, ...]:
    return (plain(f"{source}.weight", path, size),)


def _of_tower(c: VisionConfig, *weights: Weight) -> tuple[Weight, ...]:
    """The weights with their paths below `vision`, and the number of the tower's layers."""
    return tuple(
        dataclasses.replace(w, path=f"{VISION}/{w.path}", layers=w.layers or c.num_layers)
        for w in weights
    )


def renamed(weights: tuple[Weight, ...], prefix: str) -> tuple[Weight, ...]:
    """A decoder's weights with names that begin with `prefix` in place of `model.`."""
    return tuple(
        dataclasses.replace(w, source=prefix + w.source.removeprefix("model."))
        if w.source.startswith("model.")
        else w
        for w in weights
    )
