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
from distflow_jax.parallel import context_parallel


def row_features(
    params: Any, model: DecoderConfig, images: RowImages, *, dtype: Any, remat: str
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
    )
    deep = context_parallel.of_each_shard(found[:, 1:]) if found.shape[1] > 1 else None
    features = context_parallel.of_each_shard(found[:, 0])
    return Seen(context_parallel.divide(images.patch), features, deep)


def image_numbers(images: RowImages, merge: int) -> jax.Array:
    """Which image of its row a token stands for, int32 [R, L]; 0 for text.

    Fields of `images` are [R, ...]; `merge`: patches of a feature.
    """
    rows, chunks, size = images.segments.shape
    # numbers are those of a chunk, and so are different ones in another
    chunk = jnp.arange(chunks, dtype=jnp.int32)[None, :, None]
    of_feature = (images.segments + chunk * (size + 1)).reshape(rows, -1)[:, ::merge]
    found = jnp.take_along_axis(of_feature, jnp.maximum(images.patch, 0), axis=1)
    return jnp.where(images.patch >= 0, found, 0)
