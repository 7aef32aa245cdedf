"""Checks of images that another process has sent: sizes that belong together, places in order.

T tokens of a prompt or a response, N patches of an image.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distflow_jax.images.record import ImagePatches
from distflow_jax.images.turn_images import TurnImages


def check_patches(name: str, cut: ImagePatches) -> None:
    """Raises ValueError, which names the image, for arrays of sizes that do not belong together."""
    patches, positions, segments = cut.patches, cut.positions, cut.segments
    _check(patches.dtype == np.uint8 and patches.ndim == 2 and patches.size, name, patches)
    count = len(patches)
    fits = positions.dtype == np.int32 and positions.shape in ((count, 2), (count, 3))
    _check(fits and positions.min() >= 0, f"{name}, positions", positions)
    fits = segments.dtype == np.int32 and segments.shape == (count,)
    _check(fits and segments.min() >= 1 and segments.max() <= count, f"{name}, segments", segments)
    features = cut.features
    if not 1 <= features <= count or not all(0 <= side <= features for side in cut.grid):
        raise ValueError(f"a frame's {name} has {features} features of {count} patches")


def check_places(name: str, patch: np.ndarray, size: int, cut: Sequence[ImagePatches]) -> None:
    """Raises ValueError unless each feature stands once, in order, in `patch`, int32 [size]."""
    _check(patch.dtype == np.int32 and patch.shape == (size,), name, patch)
    at, first = np.flatnonzero(patch != -1), 0
    count = sum(one.features for one in cut)
    _check(np.array_equal(patch[at], np.arange(count)), name, patch)
    for one in cut:
        own = at[first : first + one.features]
        if math.prod(one.grid) == one.features:  # a grid has no text within
            _check(own[-1] - own[0] == one.features - 1, name, patch)
        first += one.features


def check_shown(shown: TurnImages, mask: np.ndarray, patch_bytes: int) -> None:
    """Raises ValueError for images of a response whose sizes do not belong together, or that stand
    where a token was sampled; `mask`: bool [T], what was sampled."""
    for number, one in enumerate(shown.cut):
        name = f"image {number} of a response"
        check_patches(name, one)
        _check(one.patches.shape[1] == patch_bytes, name, one.patches)
    check_places("patch of a response", shown.patch, len(mask), shown.cut)
    _check(not np.any(mask & (shown.patch != -1)), "patch of a response", shown.patch)


def _check(fits: Any, name: str, array: np.ndarray) -> None:
    if not fits:
        raise ValueError(f"a frame's {name} does not fit: {array.dtype}{list(array.shape)}")
