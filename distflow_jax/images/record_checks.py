"""Checks of images that another program sends, with their places among tokens.

P tokens of a prompt, T of a response, N patches of an image.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distflow_jax.images.patch_chunks import PatchSizes, segment_runs
from distflow_jax.images.record import Image
from distflow_jax.images.turn_images import TurnImages

_DIGEST_BYTES = 16


def check_shown(shown: TurnImages, sampled: np.ndarray, sizes: PatchSizes) -> None:
    """Raises ValueError unless the images of a response, `sampled` bool [T], are those that a tower
    of these sizes reads, at tokens that were not sampled."""
    if not shown.images:
        raise ValueError("images, and there are none")
    for number, image in enumerate(shown.images):
        name, cut = f"image {number}", image.cut
        check_image(name, image)
        count, longest = len(cut.patches), max(n for _, n in segment_runs(cut))
        fits = cut.patches.shape[1] == sizes.patch_bytes and cut.positions.shape[1] == sizes.dims
        fits = fits and count == cut.features * sizes.merge and longest <= sizes.chunk
        _check(fits and not any(n % sizes.merge for _, n in segment_runs(cut)), name, cut.patches)
    check_places("patch", shown.patch, len(sampled), shown.images)
    if np.any(shown.patch[sampled] != -1):
        raise ValueError("features of an image at tokens that were sampled")


def check_image(name: str, image: Image) -> None:
    """Raises ValueError unless an image's arrays and numbers belong together."""
    cut = image.cut
    patches, positions, segments = cut.patches, cut.positions, cut.segments
    _check(image.pixels.dtype == np.uint8 and image.pixels.ndim == 3, name, image.pixels)
    _check(patches.dtype == np.uint8 and patches.ndim == 2 and patches.size, name, patches)
    count = len(patches)
    fits = positions.dtype == np.int32 and positions.shape in ((count, 2), (count, 3))
    _check(fits and positions.min() >= 0, f"{name}, positions", positions)
    fits = segments.dtype == np.int32 and segments.shape == (count,)
    _check(fits and segments.min() >= 1 and segments.max() <= count, f"{name}, segments", segments)
    features, (rows, columns) = cut.features, cut.grid
    whole = all(type(number) is int for number in (features, rows, columns))
    if not (whole and 1 <= features <= count and 0 <= min(rows, columns)):
        raise ValueError(f"{name} has {features} features of {count} patches")
    if max(rows, columns) > features:
        raise ValueError(f"{name} has {rows} x {columns} places, {features} features")
    if len(image.digest) != _DIGEST_BYTES:
        raise ValueError(f"{name} has a digest of {len(image.digest)} bytes")


def check_places(name: str, patch: np.ndarray, size: int, images: Sequence[Image]) -> None:
    """Raises ValueError unless each feature of `images` stands once, in order, among `size`
    tokens: `patch` int32 [size], -1 for text."""
    _check(patch.dtype == np.int32 and patch.shape == (size,), name, patch)
    cut = [image.cut for image in images]
    at, first = np.flatnonzero(patch != -1), 0
    count = sum(one.features for one in cut)
    _check(np.array_equal(patch[at], np.arange(count)), name, patch)
    for one in cut:
        own = at[first : first + one.features]
        if math.prod(one.grid) == one.features:  # a grid has no text within
            _check(own[-1] - own[0] == one.features - 1, name, patch)
        first += one.features


def _check(fits: Any, name: str, array: np.ndarray) -> None:
    if not fits:
        raise ValueError(f"{name} does not fit: {array.dtype}{list(array.shape)}")
