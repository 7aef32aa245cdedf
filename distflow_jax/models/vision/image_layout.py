"""Rules by which a family resizes an image, cuts it into patches and names it among the tokens.

The sizes are those of transformers' image processors. An image is cut into squares of merge^2
patches, one for each feature, in the order of rows.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from distflow_jax.images import pillow
from distflow_jax.images.record import Image, ImagePatches, ImageSize
from distflow_jax.models.vision.vision_config import VisionConfig

_MOST_RATIO = 200  # of the sides, for Qwen's towers
_MOST_SIDE = 4096  # of a picture before it is cut into tiles
# text that a family's chat template writes in the place of an image
_MARKERS = {
    "smolvlm": "<image>",
    "gemma3": "<start_of_image>",
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"),
}
# Pillow's filters
_FILTERS = {"gemma3": "BILINEAR", "qwen2_5_vl": "BICUBIC", "qwen3_vl": "BICUBIC"}
_TILE = "<row_{row}_col_{column}>"
_MOST_TILES = 12  # of a side with a token of their own


class ImageTokenizer(Protocol):
    """The part of a tokenizer that a layout needs."""

    backend: Any  # with token_to_id

    def encode(self, text: str) -> np.ndarray:
        """Text -> ids, int32 [T]."""


@dataclasses.dataclass(frozen=True)
class TileTokens:
    """Ids that SmolVLM writes around the features of tiles; empty where a tokenizer has none."""

    edge: tuple[int, ...] = ()  # before every tile, and behind the last
    whole: tuple[int, ...] = ()  # before the whole picture
    places: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    line: tuple[int, ...] = ()  # behind a row of tiles
    last_line: tuple[int, ...] = ()  # behind the last row


@dataclasses.dataclass(frozen=True)
class FamilyLayout:
    """The layout of one model's images: images.record.ImageLayout.

    Attributes:
      before, after: ids around the features of an image that is not cut into tiles.
      around: text before and behind an image, which is tokenized with that beside it.
      most_features: of an image, `data.image_tokens`; 0: as many as the family takes.
    """

    config: VisionConfig
    marker: str
    placeholder: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    tiles: TileTokens = dataclasses.field(default_factory=TileTokens, hash=False)
    most_features: int = 0
    around: str = ""

    def size(self, height: int, width: int) -> ImageSize:
        """The size at which an image of this size is seen, see images.record.ImageLayout."""
        own = self._size(height, width, 0)
        found = self._size(height, width, self.most_features) if self.most_features else own
        if self.most_features and found.features > self.most_features:
            raise ValueError(
                f"an image of {width} x {height} takes at least {found.features} tokens; use "
                f"data.image_tokens={found.features} or more, or a smaller image"
            )
        shrunk = found.features < own.features
        return dataclasses.replace(found, shrunk=shrunk)

    def cut(self, image: Image) -> ImagePatches:
        """The patches of an image, see images.record.ImageLayout."""
        if image.patches is not None:
            return image.patches
        c, pixels = self.config, image.pixels
        size = self.size(*pixels.shape[:2])
        side = c.merge * c.patch_size
        if not c.square:
            pixels = resize(pixels, size.height, size.width, self._filter)
            grid = (size.height // side, size.width // side)
            return _joined(c, [pixels], grid)
        if c.family != "gemma3":
            edge = self._edge(*pixels.shape[:2]) or c.image_size
            pixels = resize(pixels, *_scaled(*pixels.shape[:2], edge), self._filter)
        pixels = resize(pixels, size.height, size.width, self._filter)
        tiles = _tiles(pixels, c.image_size)
        if len(tiles) == 1:
            return _joined(c, tiles, (c.grid // c.merge,) * 2)
        return _joined(c, [*tiles, resize(pixels, *(c.image_size,) * 2, self._filter)], (0, 0))

    @property
    def _filter(self) -> str:
        return _FILTERS.get(self.config.family, "LANCZOS")

    def _size(self, height: int, width: int, most: int) -> ImageSize:
        """The size with at most `most` features, or with the fewest possible; 0: no limit."""
        c = self.config
        if c.square and not c.longest_edge:
            return self._one(c.image_size, c.image_size)
        if c.square:
            return self._tiled(height, width, most)
        factor = c.patch_size * c.merge
        most_pixels = c.most_pixels or height * width + factor**2
        if most:
            most_pixels = min(most_pixels, most * factor**2)
        least = min(c.least_pixels, most_pixels)
        return self._one(*smart_size(height, width, factor, least, most_pixels))

    def _one(self, height: int, width: int) -> ImageSize:
        side = self.config.patch_size * self.config.merge
        count = (height // side) * (width // side)
        return ImageSize(height, width, (*self.before, *(-1,) * count, *self.after))

    def _edge(self, height: int, width: int) -> int:
        """Longest edge to which the image is scaled before it is cut; 0: one square."""
        c, most = self.config, self.most_features
        for edge in range(c.longest_edge, 0, -c.image_size):
            size = _tiled_size(height, width, edge, c.image_size)
            tiles = (size[0] // c.image_size) * (size[1] // c.image_size)
            count = 1 if tiles == 1 else tiles + 1
            if not most or count * (c.grid // c.merge) ** 2 <= most:
                return edge
        return 0

    def _tiled(self, height: int, width: int, most: int) -> ImageSize:
        c, side = self.config, self.config.image_size
        edge = self._edge(height, width) if most else c.longest_edge
        rows, columns = (x // side for x in _tiled_size(height, width, edge or side, side))
        if not edge or rows * columns == 1:
            return self._one(side, side)
        features, tiles = (-1,) * (c.grid // c.merge) ** 2, self.tiles
        tokens: list[int] = []
        for row in range(rows):
            for column in range(columns):
                place = tiles.places.get((row, column))
                tokens += [*tiles.edge, *([] if place is None else [place]), *features]
            tokens += tiles.line if row < rows - 1 else tiles.last_line
        tokens += [*tiles.edge, *tiles.whole, *features, *tiles.edge]
        return ImageSize(rows * side, columns * side, tuple(tokens))


def resize(pixels: np.ndarray, height: int, width: int, kind: str) -> np.ndarray:
    """Pixels uint8 [H, W, 3] as [height, width, 3], by one of Pillow's filters."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = pillow.load()
    filtered = getattr(image.Resampling, kind)
    return np.asarray(image.fromarray(pixels).resize((width, height), filtered))


def smart_size(
    height: int, width: int, factor: int, least_pixels: int, most_pixels: int
) -> tuple[int, int]:
    """Height and width in multiples of `factor`, with nearly the ratio and about as many pixels.

    Raises ValueError for sides whose ratio is above 200, as transformers does.
    """
    if max(height, width) / min(height, width) > _MOST_RATIO:
        raise ValueError(
            f"an image of {width} x {height} has sides whose ratio is above {_MOST_RATIO}, the "
            "most that this model takes; crop it or leave the row out"
        )
    high, wide = (round(side / factor) * factor for side in (height, width))
    if high * wide < least_pixels:
        grow = math.sqrt(least_pixels / (height * width))
        high, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
    if high * wide > most_pixels:  # or enlarged beyond it, where least and most are close
        shrink = math.sqrt((height * width) / most_pixels)
        high, wide = (
            max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
        )
    return max(high, factor), max(wide, factor)


def _scaled(height: int, width: int, edge: int) -> tuple[int, int]:
    """Size whose longest side is `edge`, the other one even."""
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        height, width = edge, int(edge * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _MOST_SIDE:
        width, height = _MOST_SIDE, int(_MOST_SIDE / ratio)
    elif height > width and height > _MOST_SIDE:
        height, width = _MOST_SIDE, int(_MOST_SIDE * ratio)
    return max(height, 1), max(width, 1)


def _tiled_size(height: int, width: int, edge: int, side: int) -> tuple[int, int]:
    """Size of a picture that is scaled to `edge` and then to whole tiles of `side`."""
    height, width = _scaled(height, width, edge)
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return max(height, side), max(width, side)


def _tiles(pixels: np.ndarray, side: int) -> list[np.ndarray]:
    """Squares [side, side, 3] of a picture [H, W, 3], row by row."""
    height, width = pixels.shape[:2]
    return [
        pixels[top : top + side, left : left + side]
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


def _joined(c: VisionConfig, pictures: Sequence[np.ndarray], grid: tuple[int, int]) -> ImagePatches:
    """The patches of pictures uint8 [H, W, 3], each a segment of its own."""
    cut = [cut_patches(picture, c.patch_size, c.merge) for picture in pictures]
    segments = [np.full(len(patches), n + 1, np.int32) for n, (patches, _) in enumerate(cut)]
    patches = np.concatenate([patches for patches, _ in cut])
    return ImagePatches(
        patches,
        np.concatenate([positions for _, positions in cut]),
        np.concatenate(segments),
        len(patches) // c.patches_per_feature,
        grid,
    )


def cut_patches(pixels: np.ndarray, patch: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches uint8 [N, patch^2 * 3] of pixels [H, W, 3], and their places int32 [N, 2].

    Squares of merge^2 patches stand together, row by row, inside as well.
    """
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    split = (rows // merge, merge, patch, columns // merge, merge, patch, 3)
    patches = pixels.reshape(split).transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, -1)
    place = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    place = place.reshape(rows // merge, merge, columns // merge, merge, 2).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(patches), place.reshape(-1, 2).astype(np.int32)


def image_layout(
    config: VisionConfig, words: ImageTokenizer, most_features: int = 0
) -> FamilyLayout:
    """The layout of a model with this tower and tokenizer.

    `most_features` is `data.image_tokens`. Raises ValueError if no image can have so few.
    """
    find = functools.partial(_ids, words)
    before, after = ((x,) if x >= 0 else () for x in (config.start_token, config.end_token))
    tiles = TileTokens()
    if config.family == "smolvlm":
        edge = find("<fake_token_around_image>")
        places = {
            (row, column): found[0]
            for row in range(_MOST_TILES)
            for column in range(_MOST_TILES)
            if (found := find(_TILE.format(row=row + 1, column=column + 1)))
        }
        lines = [tuple(map(int, words.encode(text))) for text in ("\n", "\n\n")]
        whole = find("<global-img>")
        tiles = TileTokens(edge, whole, places, *(lines if edge else ()))
        before, after = (*edge, *whole), edge
    marker = _MARKERS.get(config.family, "")
    known = all(words.backend.token_to_id(t) is not None for t in _tokens_of(marker))
    layout = FamilyLayout(
        config,
        marker if marker and known else "",
        max(config.image_token, 0),
        before,
        after,
        tiles,
        most_features,
        # its tokenizer joins these lines with those of the text
        "\n\n" if config.family == "gemma3" and config.start_token >= 0 else "",
    )
    layout.size(64, 64)
    return layout


def _tokens_of(marker: str) -> list[str]:
    return [f"{part}>" for part in marker.split(">") if part]


def _ids(words: ImageTokenizer, token: str) -> tuple[int, ...]:
    """The id of a token, or nothing."""
    found = words.backend.token_to_id(token)
    return () if found is None else (found,)
