"""The images of one prompt, joined: patches, places and rotary positions of its tokens.

P tokens of a prompt, N patches of all its images, F features.
"""

import dataclasses
import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from distflow_jax.images.record import Image, ImagePatches

_FIELDS = ("patch", "patches", "positions", "segments", "rotary")


@dataclasses.dataclass(frozen=True, eq=False)
class PromptImages:
    """Arrays of a prompt's images; features are numbered over all of them."""

    patch: np.ndarray  # int32 [P]: the feature that stands at each token, -1 for text
    patches: np.ndarray  # uint8 [N, patch_bytes]
    positions: np.ndarray  # int32 [N, 2 or 3], of each patch in its picture
    segments: np.ndarray  # int32 [N], from 1 and unique over the images: see ImagePatches
    rotary: np.ndarray  # int32 [P, 3]: position by time, row and column
    count: int  # images

    @property
    def features(self) -> int:
        """F, the features of all images."""
        return int(self.patch.max(initial=-1)) + 1

    @property
    def shift(self) -> int:
        """The position after the prompt less its tokens: an image takes fewer positions."""
        return int(self.rotary.max(initial=-1)) + 1 - len(self.patch)


def prompt_images(images: Sequence[Image], patch: np.ndarray | None) -> PromptImages | None:
    """The images of a prompt that the loader has cut; `patch` int32 [P]. None without images."""
    if patch is None or not images:
        return None
    cut = [image.cut for image in images]
    segments, first = [], 0
    for one in cut:
        segments.append(one.segments + first)
        first += int(one.segments.max())
    return PromptImages(
        np.asarray(patch, np.int32),
        np.concatenate([one.patches for one in cut]),
        np.concatenate([one.positions for one in cut]).astype(np.int32),
        np.concatenate(segments).astype(np.int32),
        rotary_positions(patch, cut),
        len(cut),
    )


def rotary_positions(patch: np.ndarray, cut: Sequence[ImagePatches]) -> np.ndarray:
    """Positions of the tokens by time, row and column, int32 [P, 3]; `patch` int32 [P].

    Text counts on. An image is at one time, its features spread over rows and columns from there,
    and text behind it goes on after the largest of its positions (Wang et al. 2024,
    arxiv.org/abs/2409.12191, sec. 2.1). Images without a grid count on as text does.
    """
    out = np.empty((len(patch), 3), np.int32)
    at, position, first = 0, 0, 0
    for one in cut:
        start = int(np.argmax(patch == first))
        text = np.arange(start - at, dtype=np.int32) + position
        out[at:start] = text[:, None]
        position += start - at
        rows, columns = one.grid
        if rows * columns == one.features:
            row, column = np.divmod(np.arange(one.features, dtype=np.int32), columns)
            out[start : start + one.features] = (
                np.stack([np.zeros_like(row), row, column], axis=1) + position
            )
            at, position = start + one.features, position + max(rows, columns)
        else:
            at = start
        first += one.features
    rest = np.arange(len(patch) - at, dtype=np.int32) + position
    out[at:] = rest[:, None]
    return out


def content_keys(tokens: np.ndarray, patch: np.ndarray, images: Sequence[Image]) -> np.ndarray:
    """Keys of a prompt by which caches compare, int64 [P]: ids, and below 0 the images' content.

    A feature's key is a hash of its image and its number there; `tokens`, `patch` int32 [P].
    """
    keys = np.asarray(tokens, np.int64).copy()
    of_feature = []
    for image in images:
        cut = image.cut
        seed = hashlib.blake2b(image.digest + repr(cut.patches.shape).encode(), digest_size=8)
        number = np.arange(cut.features, dtype=np.uint64)
        mixed = np.uint64(int.from_bytes(seed.digest(), "little")) + number * np.uint64(
            0x9E3779B97F4A7C15
        )
        of_feature.append((mixed >> np.uint64(2)).astype(np.int64))
    known = -2 - np.concatenate(of_feature)
    is_image = patch >= 0
    keys[is_image] = known[patch[is_image]]
    return keys


def to_bytes(tokens: np.ndarray, images: PromptImages) -> np.ndarray:
    """A prompt with images as one array uint8 [n], for another process; `tokens` int32 [P]."""
    n, width = images.patches.shape
    head = struct.pack("<5q", len(tokens), n, width, images.positions.shape[1], images.count)
    parts = [np.asarray(tokens, np.int32), *(getattr(images, name) for name in _FIELDS)]
    body = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    return np.frombuffer(head + body, np.uint8)


def from_bytes(blob: np.ndarray) -> tuple[np.ndarray, PromptImages]:
    """Inverse of `to_bytes`, of uint8 [n]: (tokens int32 [P], images)."""
    data = blob.tobytes()
    p, n, width, dims, count = struct.unpack_from("<5q", data)
    at, found = struct.calcsize("<5q"), []
    shapes = ((p,), (p,), (n, width), (n, dims), (n,), (p, 3))
    for number, shape in enumerate(shapes):
        dtype = np.dtype(np.uint8 if number == 2 else np.int32)
        size = int(np.prod(shape))
        found.append(np.frombuffer(data, dtype, size, at).reshape(shape))
        at += size * dtype.itemsize
    tokens, *fields = found
    return tokens, PromptImages(*fields, count=count)
