"""Decode attention of ragged owners over paged keys and values, by the kernel of the platform.

O owners (a slot, or a prompt that several slots share), K key/value heads, R query rows per
key/value head (query heads of the group x members x new tokens), H head dim, N pages of W tokens,
C table entries per owner.
"""

import jax
import jax.numpy as jnp

from distflow_jax.models.kernels.decode_gpu import gpu_attention
from distflow_jax.models.kernels.decode_reference import reference_attention
from distflow_jax.models.kernels.decode_tpu import tpu_attention
from distflow_jax.models.kernels.merge_partial import PartialAttention

IMPLEMENTATIONS = ("reference", "gpu", "tpu")
# names that devices and lowerings go by
_PLATFORMS = {
    "cpu": "reference",
    "gpu": "gpu",
    "cuda": "gpu",
    "rocm": "gpu",
    "tpu": "tpu",
}


def implementation_for(platform: str) -> str:
    """The implementation for a device's `platform` ("cpu", "gpu", "cuda", "rocm" or "tpu")."""
    if platform not in _PLATFORMS:
        raise ValueError(
            f"no attention kernel is known for platform {platform!r}, only for "
            f'{", ".join(_PLATFORMS)}: give implementation="reference"'
        )
    return _PLATFORMS[platform]


def partial_attention(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    table: jax.Array,
    length: jax.Array,
    *,
    implementation: str,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    first: jax.Array | None = None,
    interpret: bool = False,
) -> PartialAttention:
    """Attention of each owner's query rows over its own pages, ready to be merged with more keys.

    q [O, K, R, H], bfloat16 or float32. key_pages [N, K, H, W] and value_pages [N, K, W, H] of one
    layer, both of bfloat16, float32, or int8 with key_scale and value_scale float32 [N, K, W]
    (a token's key is int8 x scale). table int32 [O, C]: page ids in order; entries at or beyond
    ceil(length / W) are never used. length int32 [O]: tokens that count, 0 to C W; what pages hold
    beyond it is never used either. first int32 [O, R], where layers have windows: the first of the
    owner's tokens that each row sees, below 1 for all; pages before every row's are not read.

    Returns out float32 [O, K, R, H] = softmax(q k / sqrt(H)) v and lse float32 [O, K, R], the
    log-sum-exp of the scores; of a row that sees no tokens 0 and -inf. Sums are kept in float32;
    products multiply in the pages' type (queries' for int8), with float32 kept float32.

    A cache of several layers is given whole, never sliced (a slice is a copy of the layer before a
    kernel): reshaped to [layers N, K, H, W], with table + layer N.

    `implementation`: "reference", "gpu" or "tpu"; "auto" takes the default backend's, which is the
    wrong one where a mesh lies on other devices: `implementation_for(device.platform)` is sure.
    A shape the named kernel cannot run is a ValueError. `interpret` runs a kernel on any device,
    slowly, for tests.
    """
    if implementation == "auto":
        implementation = implementation_for(jax.default_backend())
    _check(q, key_pages, value_pages, table, length, key_scale, value_scale, first)
    arguments = (q, key_pages, value_pages, table, length, key_scale, value_scale, first)
    if implementation == "reference":
        return reference_attention(*arguments)
    if implementation == "gpu":
        return gpu_attention(*arguments, interpret=interpret)
    if implementation == "tpu":
        return tpu_attention(*arguments, interpret=interpret)
    raise ValueError(
        f"implementation must be auto, {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
    )


def _check(q, key_pages, value_pages, table, length, key_scale, value_scale, first) -> None:
    if q.ndim != 4 or key_pages.ndim != 4:
        raise ValueError(
            f"q is [O, K, R, H] and key_pages [N, K, H, W], got {list(q.shape)} and "
            f"{list(key_pages.shape)}"
        )
    owners, kv_heads, _, head_dim = q.shape
    pages, _, _, width = key_pages.shape
    shapes = {
        "q": (q, (owners, kv_heads, q.shape[2], head_dim)),
        "key_pages": (key_pages, (pages, kv_heads, head_dim, width)),
        "value_pages": (value_pages, (pages, kv_heads, width, head_dim)),
        "table": (table, (owners, table.shape[-1] if table.ndim else 0)),
        "length": (length, (owners,)),
    }
    if key_scale is not None and value_scale is not None:
        shapes["key_scale"] = (key_scale, (pages, kv_heads, width))
        shapes["value_scale"] = (value_scale, (pages, kv_heads, width))
    if first is not None:
        shapes["first"] = (first, (owners, q.shape[2]))
        if first.dtype != jnp.int32:
            raise ValueError(f"first must be int32, got {first.dtype}")
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} must be {list(shape)} beside q {list(q.shape)} and key_pages "
                f"{list(key_pages.shape)}, got {list(array.shape)}"
            )
        if 0 in shape:
            raise ValueError(f"{name} has no elements: {list(shape)}")
    floats = (jnp.bfloat16, jnp.float32)
    if q.dtype not in floats:
        raise ValueError(f"q must be bfloat16 or float32, got {q.dtype}")
    if key_pages.dtype != value_pages.dtype or key_pages.dtype not in (*floats, jnp.int8):
        raise ValueError(
            "key_pages and value_pages must both be bfloat16, float32 or int8, got "
            f"{key_pages.dtype} and {value_pages.dtype}"
        )
    scaled = {s is not None and s.dtype == jnp.float32 for s in (key_scale, value_scale)}
    if scaled != {key_pages.dtype == jnp.int8}:
        got = [None if s is None else str(s.dtype) for s in (key_scale, value_scale)]
        raise ValueError(
            "int8 pages take a key_scale and a value_scale of float32, other pages take none; got "
            f"{key_pages.dtype} pages with scales {got}"
        )
    if table.dtype != jnp.int32 or length.dtype != jnp.int32:
        raise ValueError(f"table and length must be int32, got {table.dtype} and {length.dtype}")
