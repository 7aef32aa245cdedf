"""Attention over packed rows by jax and by optional packages, on one device's rows and heads.

B rows, T query tokens, S key tokens, N heads, K key/value heads, H head dim. What each can do:
config/implementation_table.py. Products and sums are those of the library: no implementation here
is exact in float32.
"""

import functools
import importlib
from typing import NamedTuple

import jax
from absl import flags
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from distflow_jax.models.attention import UNLIMITED, masked_attention
from distflow_jax.models.remat import ATTENTION, named

SPLASH_UNIT = 128  # tokens that divide a row of splash attention: a vector's lanes
_SPLASH_BLOCKS = (512, 256, SPLASH_UNIT)


class Segments(NamedTuple):
    """Rows of whole sequences, for implementations without masks."""

    segment_BT: jax.Array  # int32, from 1 on; 0: padding
    position_BT: jax.Array  # int32, in the sequence
    sequence_BS: jax.Array  # of any dtype: S is the most sequences of a row


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
    *,
    implementation: str = "cudnn",
) -> jax.Array:
    """masked_attention by cuDNN.

    The mask becomes a bias [B, 1, T, S] in the dtype of q, and cuDNN computes all scores and the
    bias' gradient. `jax.nn` passes no starts of segments to cuDNN, so masked tiles are not skipped.
    """
    out = jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=mask_BTS[:, None], implementation=implementation
    )
    return named(ATTENTION, out)


def tokamax_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
    soft_cap: float = 0.0,
) -> jax.Array:
    """masked_attention by the first implementation of tokamax that takes these arguments."""
    tokamax = importlib.import_module("tokamax")
    if not flags.FLAGS.is_parsed():  # tokamax would parse the arguments of this program
        flags.FLAGS(["tokamax"])
    out = tokamax.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=mask_BTS[:, None], logits_soft_cap=soft_cap or None
    )
    return named(ATTENTION, out)


def splash_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    rows: Segments,
    window: int = 0,
    sinks_N: jax.Array | None = None,
    *,
    soft_cap: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention within segments by splash attention, [B, T, N, H] like q.

    A token sees the last `window` tokens of its segment, itself included; 0: all. Padding attends
    to padding. `sinks_N` and `soft_cap` are as of masked_attention.
    """
    length, heads, head_dim = q_BTNH.shape[1:]
    side = next(n for n in _SPLASH_BLOCKS if length % n == 0)
    shape, masks = (length, length), splash_attention_mask
    mask = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
    blocks = dict.fromkeys(
        (
            *("block_q", "block_kv", "block_kv_compute", "block_q_dq", "block_kv_dq"),
            *("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"),
        ),
        side,
    )
    attend = splash_attention_kernel.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(**blocks),
        attn_logits_soft_cap=soft_cap or None,
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )
    ids = splash_attention_kernel.SegmentIds(rows.segment_BT, rows.segment_BT)
    q, k, v = (x.swapaxes(1, 2) for x in (q_BTNH * head_dim**-0.5, k_BTKH, v_BTKH))
    return jax.vmap(attend, (0, 0, 0, 0, None))(q, k, v, ids, sinks_N).swapaxes(1, 2)


def transformer_engine_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    rows: Segments,
    window: int = 0,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """splash_attention by Transformer Engine's fused attention over packed segments."""
    library = importlib.import_module("transformer_engine.jax.attention")
    kinds = library.AttnSoftmaxType
    return library.fused_attn(
        (q_BTNH, k_BTKH, v_BTKH),
        None,
        library.SequenceDescriptor.from_segment_ids_and_pos(rows.segment_BT, rows.position_BT),
        None,
        attn_bias_type=library.AttnBiasType.NO_BIAS,
        attn_mask_type=library.AttnMaskType.PADDING_CAUSAL_MASK,
        qkv_layout=library.QKVLayout.THD_THD_THD,
        softmax_type=kinds.VANILLA_SOFTMAX if sinks_N is None else kinds.LEARNABLE_SOFTMAX,
        scaling_factor=q_BTNH.shape[3] ** -0.5,
        dropout_probability=0.0,
        is_training=True,
        max_segments_per_seq=rows.sequence_BS.shape[1],
        window_size=(window - 1, 0) if window else None,
        context_checkpoint_name=ATTENTION,
        softmax_offset=None if sinks_N is None else sinks_N.reshape(1, -1, 1, 1),
    )


# by a mask bool [B, T, S], and by segments; "loops": XLA
BY_MASK = {
    "loops": masked_attention,
    "cudnn": cudnn_attention,
    "tokamax": tokamax_attention,
}
BY_SEGMENTS = {
    "splash": splash_attention,
    "transformer_engine": transformer_engine_attention,
}


def in_segments(
    implementation: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Segments,
    sliding_window: int,
    window: jax.Array | None,
) -> jax.Array:
    """One of BY_SEGMENTS in a layer, [B, T, N, H] like q; k and v are [B, T, K, H].

    `window` int32 is the layer's: `sliding_window`, or UNLIMITED; None: the model has no windows.
    """
    attend = functools.partial(BY_SEGMENTS[implementation], rows=rows)
    if window is None:
        return attend(q, k, v)
    near = functools.partial(attend, window=sliding_window)
    return jax.lax.cond(window < UNLIMITED, near, attend, q, k, v)
