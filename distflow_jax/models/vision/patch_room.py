"""Room for patches beside rows and before prefills: static, so that nothing recompiles."""

import math

from distflow_jax.images.patch_chunks import PatchSizes, chunks_for
from distflow_jax.models.vision.vision_config import VisionConfig

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
