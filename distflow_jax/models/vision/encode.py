"""The vision tower: a scan over stacked layers, on rows of patches of several images.

B rows, N patches of a row, M features of a row, D hidden, W width of features, A heads, H head dim.

Patches of an image have one segment number and attend to each other, both ways; 0 is padding. A
layer with windows has other segment numbers, one for each window of an image. The patches of a
feature are neighbours: N = merge^2 M. Their squares are in any order.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.models.remat import MLP, OUTPUT, PROJECTION, named, rematerialised
from distflow_jax.models.vision.patch_attention import WHOLE, Form, Pairs, attend, chosen, pairs_of
from distflow_jax.models.vision.vision_config import VisionConfig
from distflow_jax.parallel.rules import constrain

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}
_MOST_WINDOWS = 1024  # along a side of an image

Weights = dict[str, Any]


def encode(
    c: VisionConfig,
    params: Weights,
    patches: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    form: Form = WHOLE,
) -> jax.Array:
    """Features of packed patches [B, M, W] in `dtype`; of one row without B, [M, W].

    With DeepStack [1 + layers, B, M, W]: behind the features for the text model's input those for
    its first layers. Features of padding are finite and have no meaning.

    Args:
      params: the tree under `vision`.
      patches: uint8 [B, N, patch_bytes].
      positions: int32 [B, N, 2], row and column of a patch in its image.
      segments: int32 [B, N], the patch's image in its row, from 1; 0 for padding.
      remat: the results that the backward pass recomputes, see remat.py.
      form: attention by a mask or by tiles.
    """
    if segments.ndim == 1:
        rows = (patches[None], positions[None], segments[None])
        return encode(c, params, *rows, dtype=dtype, remat=remat, form=form)[..., 0, :, :]
    x = _shared(_embedded(c, params, patches, positions, segments, dtype))
    tables = rotary_tables_2d(c, positions) if c.traits.rotary else None
    every = near = pairs_of(segments, form)
    if c.window:
        near = pairs_of(window_segments(c, positions, segments), form)
    layer = rematerialised(functools.partial(_layer, c, (every, near, form), tables), remat)
    features, start = [], 0
    for number, stop in enumerate([*(n + 1 for n in c.deepstack), c.num_layers]):
        window = np.array([c.window > 0 and n not in c.full_layers for n in range(start, stop)])
        window = jnp.asarray(window, bool)
        weights = jax.tree.map(lambda w, a=start, b=stop: w[a:b], params["layers"])
        x, _ = jax.lax.scan(layer, x, (weights, window))
        if number < len(c.deepstack):
            merger = jax.tree.map(lambda w, n=number: w[n], params["deepstack"])
            features.append(_projected(c, merger, x, norm_merged=True))
        start = stop
    if c.traits.final_norm:
        x = _norm(c, x, params, "final_norm")
    first = _projected(c, params["merger"], x)
    return jnp.stack([first, *features]) if c.deepstack else first


def _embedded(
    c: VisionConfig,
    params: Weights,
    patches: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    dtype: Any,
) -> jax.Array:
    """Patches [B, N, bytes] as vectors [B, N, D], with learned positions."""
    colours = patches.reshape(*patches.shape[:-1], -1, 3).astype(jnp.float32)
    mean, std = (jnp.asarray(x, jnp.float32) for x in (c.mean, c.std))
    pixels = ((colours / 255 - mean[None, None, None]) / std[None, None, None]).astype(dtype)
    kernel = jnp.sum(params["patch"].astype(jnp.float32), axis=0).astype(dtype)
    x = jnp.einsum("BNI,ID->BND", pixels.reshape(patches.shape), kernel)
    if c.traits.patch_bias:
        x = x + params["patch_bias"].astype(dtype)[None, None]
    if c.traits.learned:
        vectors = grid_vectors(c, params["position"].astype(jnp.float32), positions, segments)
        x = x + vectors.astype(dtype)
    return x


def _layer(
    c: VisionConfig, related: tuple[Pairs, Pairs, Form], tables: Any, x: jax.Array, inputs: Any
) -> tuple[jax.Array, None]:
    """The residual stream [B, N, D] after a layer; `inputs` is (weights, has windows)."""
    w, windowed = inputs
    every, near, form = related
    pairs = chosen(windowed, near, every) if c.window else every
    h = _norm(c, x, w, "attention_norm")
    x = x + _shared(_attention(c, w, h, tables, lambda q, k, v: attend(q, k, v, pairs, form)))
    x = x + _shared(_mlp(c, w, _norm(c, x, w, "mlp_norm")))
    return _shared(x), None


def window_segments(c: VisionConfig, positions: jax.Array, segments: jax.Array) -> jax.Array:
    """Segment numbers of layers with windows, int32 [B, N], of positions [B, N, 2] and images."""
    row, column = positions[..., 0] // c.window, positions[..., 1] // c.window
    number = (segments * _MOST_WINDOWS + row) * _MOST_WINDOWS + column
    return jnp.where(segments > 0, number, 0)


def _attention(
    c: VisionConfig,
    w: Weights,
    h: jax.Array,
    tables: Any,
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    if c.traits.fused:
        qkv = _product("BND,DXAH->XBNAH", h, w, "qkv", heads=True)
        q, k, v = (named(PROJECTION, x) for x in qkv)
    else:
        q, k, v = (
            named(PROJECTION, _product("BND,DAH->BNAH", h, w, name))
            for name in ("query", "key", "value")
        )
    if tables is not None:
        q, k = rotate_2d(q, tables), rotate_2d(k, tables)
    q, k, v = (constrain(x, "tower_rows", "length", "tower_heads", "head_dim") for x in (q, k, v))
    return named(OUTPUT, _product("BNAH,AHD->BND", attend(q, k, v), w, "output"))


def _mlp(c: VisionConfig, w: Weights, h: jax.Array) -> jax.Array:
    activation = _ACTIVATIONS[c.traits.activation]
    up = named(MLP, _product("BND,DF->BNF", h, w, "up"))
    if c.traits.gated:
        up = activation(named(MLP, _product("BND,DF->BNF", h, w, "gate"))) * up
    else:
        up = activation(up)
    return _product("BNF,FD->BND", constrain(up, "tower_rows", "length", "tower_mlp"), w, "down")


def _product(spec: str, x: jax.Array, w: Weights, name: str, *, heads: bool = False) -> jax.Array:
    """Product with a weight and its bias; `heads`: query, key and value come first."""
    y = jnp.einsum(spec, x, w[name].astype(x.dtype))
    bias = w[f"{name}_bias"].astype(x.dtype)
    return y + (bias[:, None, None] if heads else bias[(None,) * (y.ndim - bias.ndim)])


def _norm(c: VisionConfig, x: jax.Array, w: Weights, name: str) -> jax.Array:
    """Layer norm, or RMS norm, over the last dim of x [..., D]; float32 inside."""
    x32 = x.astype(jnp.float32)
    scale = w[name].astype(jnp.float32)[(None,) * (x.ndim - 1)]
    if not c.traits.rms:
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + c.norm_eps) * scale
    if not c.traits.rms:
        y = y + w[f"{name}_bias"].astype(jnp.float32)[(None,) * (x.ndim - 1)]
    return y.astype(x.dtype)


def _projected(
    c: VisionConfig, w: Weights, x: jax.Array, *, norm_merged: bool = False
) -> jax.Array:
    """Features [B, M, W] of patches [B, N, D]; `norm_merged` norms the merged vector."""
    rows, count, _ = x.shape
    squares = x.reshape(rows, count // c.patches_per_feature, c.patches_per_feature, -1)
    if c.traits.projector == "pooled":
        mean = jnp.mean(squares.astype(jnp.float32), axis=2)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(mean), axis=-1, keepdims=True) + c.norm_eps)
        h = (mean * inverse * (1 + w["norm"].astype(jnp.float32))[None, None]).astype(x.dtype)
        return _features(h, w["down"])
    if c.traits.projector == "linear":
        return _features(squares.reshape(*squares.shape[:2], -1), w["down"])
    if not norm_merged:
        squares = _norm(c, squares, w, "norm")
    h = squares.reshape(*squares.shape[:2], -1)
    if norm_merged:
        h = _norm(c, h, w, "norm")
    h = jax.nn.gelu(_product("BME,EF->BMF", h, w, "up"), approximate=False)
    h = constrain(h, "tower_rows", "length", "tower_mlp")
    return _shared(_product("BMF,FW->BMW", h, w, "down"))


def _features(h: jax.Array, weight: jax.Array) -> jax.Array:
    return _shared(jnp.einsum("BME,EW->BMW", h, weight.astype(h.dtype)))


def _shared(x: jax.Array) -> jax.Array:
    """Pins the layout of x [B, N, D]: rows divided over devices, the rest whole."""
    return constrain(x, "tower_rows", "length", "activation")


def rotary_tables_2d(c: VisionConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and signed sines, float32 [B, N, 2, H / 2] each, of positions int32 [B, N, 2].

    The first half of the pairs turns by the row, the second by the column, both with the same
    frequencies theta^(-4i/H).
    """
    half = c.head_dim // 2
    frequencies = c.rope_theta ** (-np.arange(0, half, 2, dtype=np.float64) / half)
    frequencies = frequencies.astype(np.float32)[None, None, None, :]
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    angle = angle.reshape(*positions.shape[:2], half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([cos, cos], axis=2), jnp.stack([-sin, sin], axis=2)


def rotate_2d(x_BNAH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of every head by rotary_tables_2d, [B, N, A, H]."""
    cos, sin = (t[:, :, None] for t in tables)
    halves = x_BNAH.astype(jnp.float32).reshape(*x_BNAH.shape[:3], 2, -1)
    out = halves * cos + jax.lax.rev(halves, (3,)) * sin
    return out.reshape(x_BNAH.shape).astype(x_BNAH.dtype)


def grid_vectors(
    c: VisionConfig, table: jax.Array, positions: jax.Array, segments: jax.Array
) -> jax.Array:
    """Vectors [B, N, D] of the learned grid [grid^2, D] at the patches' places.

    Where sizes are free, the corners of an image lie on those of the grid, and the four nearest
    vectors are weighed. A square picture has the grid's size. (transformers finds places by float32
    fractions of a side, which is the same for sides of 14, 16, 26, 27 and 32.) `positions` int32
    [B, N, 2], `segments` int32 [B, N].
    """
    if c.square:
        inside = jnp.clip(positions, 0, c.grid - 1)
        return table[inside[..., 0] * c.grid + inside[..., 1]]
    last = jnp.maximum(_last_positions(positions, segments), 1).astype(jnp.float32)
    place = positions.astype(jnp.float32) * (c.grid - 1) / last
    floor = jnp.clip(jnp.floor(place), 0, c.grid - 1)
    low, share = floor.astype(jnp.int32), place - floor
    total = jnp.zeros((*segments.shape, table.shape[1]), table.dtype)
    for down in (0, 1):
        row = jnp.minimum(low[..., 0] + down, c.grid - 1)
        of_row = share[..., 0] if down else 1 - share[..., 0]
        for right in (0, 1):
            column = jnp.minimum(low[..., 1] + right, c.grid - 1)
            weight = of_row * (share[..., 1] if right else 1 - share[..., 1])
            total = total + weight[..., None] * table[row * c.grid + column]
    return total


def _last_positions(positions: jax.Array, segments: jax.Array) -> jax.Array:
    """Row and column of the last patch of each patch's image, int32 [B, N, 2]."""
    count = segments.shape[1]

    def of_row(position, segment):
        last = jax.ops.segment_max(position, segment, num_segments=count + 1)
        return last[segment]

    return jax.vmap(of_row)(positions, jnp.clip(segments, 0, count))
