"""The record of an image, and the interface by which a model's family cuts it into patches.

An image stands in a prompt by its place, never by a token id: `batch.Prompt.patch` numbers the
features at their positions. All pixels stay uint8 until they are on a device.
"""

import dataclasses
import hashlib
from typing import Protocol

import numpy as np

MARK = "<image>"  # stands for an image in the text of a row with an `images` column


@dataclasses.dataclass(frozen=True, eq=False)
class ImagePatches:
    """An image as a tower takes it: N patches, which give `features` features.

    The order of the patches is that of the family's tower, and of the features too.
    """

    patches: np.ndarray  # uint8 [N, patch_bytes]
    positions: np.ndarray  # int32 [N, 2 or 3], of each patch in its picture
    # int32 [N], from 1: patches that attend to each other have one number; 1 everywhere, or the
    # tile's number where a family cuts an image into tiles
    segments: np.ndarray
    features: int
    grid: tuple[int, int] = (0, 0)  # rows and columns of features; (0, 0): no single grid


@dataclasses.dataclass(frozen=True, eq=False)
class Image:
    """A picture, told from others by its content.

    `pixels` uint8 [H, W, 3] are those of the file. Where the loader has cut the image into
    `patches`, the pixels are a preview of at most PREVIEW a side: read `patches`, and do not cut
    again. `digest` is always that of the pixels of the file, after conversion to RGB.
    """

    pixels: np.ndarray
    digest: bytes
    patches: ImagePatches | None = None
    shrunk: bool = False  # whether data.image_tokens made it smaller than its family would

    @property
    def cut(self) -> ImagePatches:
        """The patches of an image that stands in a prompt or a response."""
        assert self.patches is not None, "images are cut before they stand among tokens"
        return self.patches


def digest_of(pixels: np.ndarray) -> bytes:
    """Hash of a picture's content, pixels uint8 [H, W, 3]: 16 bytes."""
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels))
    return digest.digest()


def image_of(pixels: np.ndarray) -> Image:
    """The record of pixels, uint8 [H, W, 3]. Raises ValueError for another form."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise ValueError(
            f"an image is uint8 [height, width, 3], got {pixels.dtype} {list(pixels.shape)}"
        )
    return Image(pixels, digest_of(pixels))


@dataclasses.dataclass(frozen=True)
class ImageSize:
    """The size at which a family's tower sees an image, and the tokens that stand for it.

    `tokens` are ids, in the order in which they stand in the prompt, with -1 wherever a feature
    stands: Qwen2.5-VL has its vision_start and vision_end around the features, SmolVLM a row and
    column token before every tile.
    """

    height: int  # of the picture after resizing
    width: int
    tokens: tuple[int, ...]
    shrunk: bool = False  # whether data.image_tokens made it smaller

    @property
    def features(self) -> int:
        """Number of features, which `patch` numbers from 0."""
        return self.tokens.count(-1)


class ImageLayout(Protocol):
    """Rules of a family with `data.image_tokens` in: a frozen dataclass of models/vision/."""

    @property
    def marker(self) -> str:
        """Text that the family's chat template writes where a message has an image.

        `<image>` or `<|vision_start|><|image_pad|><|vision_end|>`, say, in whose place `tokens` of
        ImageSize stand. It is "" where no template writes one: a text model with a new tower.
        """

    @property
    def placeholder(self) -> int:
        """Id written to `Prompt.tokens` where features stand. Nothing compares it."""

    @property
    def around(self) -> str:
        """Text before and behind an image, which is tokenized with that beside it."""

    def size(self, height: int, width: int) -> ImageSize:
        """The size at which an image of this size is seen.

        Raises ValueError, without a place, if the family cannot take it (a side too short, a ratio
        of the sides above its limit) or if the least number of features is above the limit.
        """

    def cut(self, image: Image) -> ImagePatches:
        """The patches of an image, with as many features as `size` says of its pixels."""
