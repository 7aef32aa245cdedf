"""Decode attention of owners of different lengths over KV pages, by the platform's kernel.

O owners (a slot, or a shared prompt), K key/value heads, R query rows per key/value head (query
heads of the group x members x new tokens), H head dim, N pages of W tokens, C block table entries
per owner. S slots, of which at most M are members of an owner: they read its pages.
"""

import jax
import jax.numpy as jnp

from distflow_jax.models.attention import UNLIMITED
from distflow_jax.models.kernels.decode_gpu import gpu_attention
from distflow_jax.models.kernels.decode_reference import reference_attention
from distflow_jax.models.kernels.decode_tpu import Members, gathers_members, tpu_attention
from distflow_jax.models.kernels.merge_partial import PartialAttention

IMPLEMENTATIONS = ("reference", "gpu", "tpu")


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
    most_pages: int = 0,
    interpret: bool = False,
) -> PartialAttention:
    """Partial attention of each owner's query rows over its own pages.

    Pass a cache of several layers whole, reshaped to [layers N, K, H, W], with table + layer N. A
    slice would be copied before the kernel runs.

    Args:
      q: [O, K, R, H], bfloat16 or float32.
      key_pages: [N, K, H, W] of one layer, bfloat16, float32 or int8.
      value_pages: [N, K, W, H], in the dtype of `key_pages`.
      table: block table, int32 [O, C]: page numbers in order. Entries from ceil(length / W) on are
        not used.
      length: int32 [O], tokens of each owner, 0 to C W. Contents of pages beyond are not used.
      implementation: "reference", "gpu" or "tpu".
      key_scale: float32 [N, K, W] for int8 pages: a token's key is int8 x scale.
      value_scale: as key_scale, of values.
      first: int32 [O, R] in layers with a window: first token that each row attends to; below 1
        for all. Pages before the first token of all rows are not read.
      most_pages: pages that all owners have at most, for estimates of costs; 0: the whole table.
      interpret: runs the kernel on any device, slowly, for tests.

    Returns:
      out float32 [O, K, R, H] = softmax(q k / sqrt(H)) v and lse float32 [O, K, R], the log-sum-exp
      of the scores; 0 and -inf for rows without keys. Sums are float32. Products are in the pages'
      dtype (for int8 in the queries'), for float32 at full precision.

    Raises:
      ValueError: for shapes or dtypes that do not fit, or that the kernel does not support.
    """
    _check(q, key_pages, value_pages, table, length, key_scale, value_scale, first)
    arguments = (q, key_pages, value_pages, table, length, key_scale, value_scale, first)
    if implementation == "reference":
        return reference_attention(*arguments)
    if implementation == "gpu":
        return gpu_attention(*arguments, interpret=interpret)
    if implementation == "tpu":
        return tpu_attention(*arguments, most_pages=most_pages, interpret=interpret)
    raise ValueError(f"implementation must be {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")


def members_attention(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    table: jax.Array,
    length: jax.Array,
    *,
    members: Members,
    implementation: str,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    first: jax.Array | None = None,
    most_pages: int = 0,
    interpret: bool = False,
) -> PartialAttention:
    """Partial attention of the rows of slots over the pages of the owners that they read.

    q [S, K, R, H] and `first` int32 [S, R] are those of slots; `members` has the owner of each. All
    others are as in `partial_attention`. Returns out float32 [S, K, R, H] and lse float32
    [S, K, R], 0 and -inf where a slot reads no owner.
    """
    _, kv_heads, rows, head_dim = q.shape
    owners, number = members.table.shape
    if first is not None:
        # where no slot reads the owner, beyond every token
        first = first.at[members.table].get(mode="fill", fill_value=UNLIMITED).reshape(owners, -1)
    pages = key_pages, value_pages, table, length
    options = {"most_pages": most_pages, "interpret": interpret}
    windowed = first is not None
    if implementation == "tpu" and gathers_members(q, key_pages, members, windowed=windowed):
        return tpu_attention(q, *pages, key_scale, value_scale, first, members=members, **options)
    of_owners = q.at[members.table].get(mode="fill", fill_value=0)  # [O, M, K, R, H]
    of_owners = of_owners.swapaxes(1, 2).reshape(owners, kv_heads, -1, head_dim)
    options |= {"implementation": implementation, "first": first}
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    found = partial_attention(of_owners, *pages, **scales, **options)
    place = jnp.clip(members.owner * number + members.number, 0, owners * number - 1)

    def to_slots(x):  # [O, K, M R, ...] -> [S, K, R, ...]
        x = x.reshape(owners, kv_heads, number, rows, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(-1, *x.shape[2:])[place]

    out, lse = map(to_slots, found)
    known = ((members.owner >= 0) & (members.owner < owners))[:, None, None]
    return jnp.where(known[..., None], out, 0.0), jnp.where(known, lse, -jnp.inf)


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
