"""Resizing of pictures to the bit as Pillow does it, in NumPy.

transformers' image processors resize by Pillow. Pillow itself is not imported here: a layout of
patches is part of a model's configuration, and Pillow reads files.

H, W height and width before, h, w after.
"""

import math
from collections.abc import Callable

import numpy as np

_BITS = 22  # of a weight's fraction, so that weighed bytes add up within an int32


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    a, x = -0.5, np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where((x >= -3) & (x < 3), np.sinc(x) * np.sinc(x / 3), 0.0)


# name -> (weight by distance, distance at which it ends)
FILTERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}


def resize(pixels: np.ndarray, height: int, width: int, kind: str) -> np.ndarray:
    """Pixels uint8 [H, W, 3] -> [h, w, 3] by one of FILTERS, first along rows, then columns."""
    if pixels.shape[1] != width:
        pixels = _along_rows(pixels, width, kind)
    if pixels.shape[0] != height:
        pixels = _along_rows(pixels.transpose(1, 0, 2), height, kind).transpose(1, 0, 2)
    return np.ascontiguousarray(pixels)


def _along_rows(pixels: np.ndarray, size: int, kind: str) -> np.ndarray:
    """[H, W, 3] -> [H, size, 3]; each tap of the filter at a time, in fixed point."""
    first, weights = _weights(pixels.shape[1], size, kind)
    total = np.full((pixels.shape[0], size, 3), 1 << (_BITS - 1), np.int32)
    for tap in range(weights.shape[1]):
        column = np.minimum(first + tap, pixels.shape[1] - 1)  # the weight there is 0
        total += pixels[:, column].astype(np.int32) * weights[None, :, tap, None]
    return np.clip(total >> _BITS, 0, 255).astype(np.uint8)


def _weights(before: int, after: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """First source pixel [after] of each pixel, and weights int32 [after, taps]."""
    function, reach = FILTERS[kind]
    scale = before / after
    stretch = max(scale, 1.0)
    reach *= stretch
    center = (np.arange(after) + 0.5) * scale
    first = np.maximum((center - reach + 0.5).astype(np.int64), 0)
    end = np.minimum((center + reach + 0.5).astype(np.int64), before)
    tap = np.arange(math.ceil(reach) * 2 + 1)
    distance = (tap[None] + first[:, None] - center[:, None] + 0.5) * (1.0 / stretch)
    share = np.where(tap[None] < (end - first)[:, None], function(distance), 0.0)
    total = np.add.accumulate(share, axis=1)[:, -1:]  # in Pillow's order
    share = np.where(total != 0, share * (1.0 / total), share) * (1 << _BITS)
    return first, np.trunc(share + np.where(share < 0, -0.5, 0.5)).astype(np.int32)
