"""Encoding of patches in chunks, one of every row after another, and room for them: static, so
that nothing recompiles.

R rows, C chunks of T patches of a row, S features of a row, W width of features, N features of
DeepStack's layers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.images.patch_chunks import PatchSizes, chunks_for
from distflow_jax.models.vision.encode import encode
from distflow_jax.models.vision.patch_attention import WHOLE, Form
from distflow_jax.models.vision.vision_config import VisionConfig
from distflow_jax.parallel.rules import constrain


def encode_chunks(
    config: VisionConfig,
    params: dict[str, Any],
    patches: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    form: Form = WHOLE,
) -> jax.Array:
    """Features [R, 1 + N, S, W] in `dtype`: those of the input first, then those of DeepStack.

    Shapes are those of the fullest row that there may be, and the time is that of the chunks which
    have a patch in some row. Features of padding have no meaning.

    Args:
      params: the tree under `vision`.
      patches: uint8 [R, C, T, patch_bytes].
      positions: int32 [R, C, T, 2].
      segments: int32 [R, C, T], from 1 in every chunk; 0 is padding.
      remat: unless "none" the backward pass encodes a chunk again, and keeps of its layers what
        remat.py says: so it holds the layers of one chunk at a time.
      form: attention by a mask or by tiles.
    """

    def run(params, *chunk):
        with jax.named_scope("vision"):  # in profiles
            found = encode(config, params, *chunk, dtype=dtype, remat=remat, form=form)
        return found if found.ndim == 4 else found[None]

    again = run if remat == "none" else jax.checkpoint(run)

    def body(_, chunk):
        shape = jax.eval_shape(run, params, *chunk)
        found = jax.lax.cond(
            jnp.any(chunk[2] > 0),
            lambda *chunk: again(params, *chunk),
            lambda *_: jnp.zeros(shape.shape, shape.dtype),
            *chunk,
        )
        return None, constrain(found, "length", "tower_rows", "length", "activation")

    by_chunk = [
        constrain(jnp.moveaxis(x, 1, 0), "length", "tower_rows", *["length"] * (x.ndim - 2))
        for x in (patches, positions, segments)
    ]
    _, found = jax.lax.scan(body, None, tuple(by_chunk))  # [C, 1 + N, R, S / C, W]
    found = found.transpose(2, 1, 0, 3, 4)
    found = found.reshape(*found.shape[:2], -1, found.shape[-1])
    return constrain(found, "tower_rows", "length", "length", "activation")


_PATCHES = 512  # of a chunk at least, where there may be so many: small images go together
_MOST_PADDING = 8  # one patch in so many, so that tiles fit


def patch_room(
    vision: VisionConfig,
    features: int,
    *,
    longest: int,
    image_tokens: int,
    rotary: bool,
    tile: int = 1,
) -> PatchSizes:
    """Sizes for images of up to `features` features together.

    Args:
      longest: tokens of a prompt; an image is in its prompt, with a token for each feature.
      image_tokens: features of one image at most, where its family shrinks images to any size.
      rotary: whether the network takes positions by time, row and column.
      tile: patches of the smallest tile of attention; a chunk has whole tiles, if few more patches
        make them whole.
    """
    merge = vision.patches_per_feature
    if vision.image_size:
        chunk = vision.grid**2
    else:
        limits = (longest, image_tokens, vision.most_pixels // vision.patch_size**2 // merge)
        chunk = min(limit for limit in limits if limit) * merge
    # whole pictures, as many as may be there
    chunk *= max(1, min(_PATCHES // chunk, -(-features * merge // chunk)))
    unit = math.lcm(tile, merge)
    whole = -(-chunk // unit) * unit
    if whole - chunk <= chunk // _MOST_PADDING:
        chunk = whole
    chunks = chunks_for(features, merge, chunk)
    return PatchSizes(chunk, chunks, vision.patch_bytes, 2, merge, rotary, vision.window)
