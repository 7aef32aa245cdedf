"""Features of the images beside packed rows, encoded within the program that needs them.

R rows, L tokens per row, C chunks of T patches per row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.batch import RowImages
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.transformer import Seen
from distflow_jax.models.vision.chunks import encode_chunks
from distflow_jax.models.vision.patch_attention import Form
from distflow_jax.parallel import context_parallel


def row_features(
    params: Any, model: DecoderConfig, images: RowImages, *, dtype: Any, remat: str, form: Form
) -> Seen:
    """The features of rows, or of their context shards; fields of `images` are [R, ...]."""
    assert model.vision is not None, "rows have images only where the model has a tower"
    found = encode_chunks(
        model.vision,
        params["vision"],
        images.patches,
        images.positions,
        images.segments,
        dtype=dtype,
        remat=remat,
        form=form,
    )
    deep = context_parallel.of_each_shard(found[:, 1:]) if found.shape[1] > 1 else None
    features = context_parallel.of_each_shard(found[:, 0])
    return Seen(context_parallel.divide(images.patch), features, deep)


def image_ends(images: RowImages, segment: jax.Array, merge: int) -> tuple[jax.Array, jax.Array]:
    """Places in its row of the first and last token of each token's image, int32 [R, L] each.

    Those of text are its own place. Segments with the same picture, responses of an environment's,
    share its features alone, and so do two showings in one response. Fields of `images` are
    [R, ...], `segment` is int32 [R, L]; `merge`: patches of a feature.
    """
    number, length = _image_numbers(images, merge), segment.shape[1]
    place = jax.lax.broadcasted_iota(jnp.int32, segment.shape, 1)
    one, other = slice(None, -1), slice(1, None)
    together = (number[:, one] == number[:, other]) & (segment[:, one] == segment[:, other])
    together &= number[:, one] > 0
    begins = jnp.pad(~together, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(~together, ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, place, length), axis=1, reverse=True)
    return first, last


def _image_numbers(images: RowImages, merge: int) -> jax.Array:
    """Which image of its row a token stands for, int32 [R, L]; 0 for text."""
    rows, chunks, size = images.segments.shape
    # numbers are those of a chunk, and so are different ones in another
    chunk = jnp.arange(chunks, dtype=jnp.int32)[None, :, None]
    of_feature = (images.segments + chunk * (size + 1)).reshape(rows, -1)[:, ::merge]
    found = jnp.take_along_axis(of_feature, jnp.maximum(images.patch, 0), axis=1)
    return jnp.where(images.patch >= 0, found, 0)
