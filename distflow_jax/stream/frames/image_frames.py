"""Images in frames: their patches and places; those of prompts once in a frame.

P tokens of a prompt, T of a response, N patches of an image. Previews go where environments read
them: no sampler does.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.images.patch_chunks import PatchSizes, segment_runs
from distflow_jax.images.record import Image, ImagePatches
from distflow_jax.images.turn_images import TurnImages

_PATCH = "patch"  # of the arrays, before a group's place
_COLUMNS = ("patches", "positions", "segments")  # of an image, behind its number
_DIGEST_BYTES = 16
MOST_IMAGE_BYTES = 48 << 20  # of a prompt: an answer to a worker has to hold them
_NO_PIXELS = np.zeros((0, 0, 3), np.uint8)


class SentImages:
    """The images of a frame's prompts.

    Attributes:
      facts: JSON values of each image.
      arrays: of all images, and the places of features in each prompt.
    """

    def __init__(self, *, previews: bool = False):
        """`previews`: with the pixels of each image."""
        self._previews = previews
        self.facts: list[dict[str, Any]] = []
        self.arrays: dict[str, np.ndarray] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}

    def add(self, place: int, prompt: Prompt) -> list[int]:
        """Adds the images of the group at a place; returns the numbers by which it names them."""
        if prompt.patch is not None:
            self.arrays[f"{_PATCH}{place}"] = np.asarray(prompt.patch, np.int32)
        return [self._add(image) for image in prompt.images]

    def _add(self, image: Image) -> int:
        cut = _cut(image)
        key = (image.digest, cut.patches.shape, cut.features, cut.grid)
        number = self._numbers.setdefault(key, len(self.facts))
        if number == len(self.facts):
            fact = {"digest": image.digest.hex(), "features": cut.features, "grid": list(cut.grid)}
            self.facts.append({**fact, "shrunk": image.shrunk})
            for name in _COLUMNS:
                self.arrays[f"image{number}.{name}"] = getattr(cut, name)
            if self._previews:
                self.arrays[f"image{number}.pixels"] = image.pixels
        return number


def images_of(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[Image, ...]:
    """The images of a frame, by their numbers, of the arrays that SentImages has.

    patches uint8 [N, patch_bytes], positions int32 [N, 2 or 3], segments int32 [N] of each.
    ValueError for sizes that do not belong together.
    """
    found = tuple(_image(n, fact, arrays) for n, fact in enumerate(facts.get("images", [])))
    for number, image in enumerate(found):
        _check_image(f"image {number}", image)
    cut = [_cut(image) for image in found]
    if len({(one.patches.shape[1], one.positions.shape[1]) for one in cut}) > 1:
        raise ValueError("a frame's images have patches of several sizes")
    return found


def patch_of(
    place: int, size: int, images: Sequence[Image], arrays: Mapping[str, np.ndarray]
) -> np.ndarray | None:
    """Which feature of `images` stands at each of the `size` tokens of the group at a place.

    int32 [P], -1 for text; None without images. ValueError unless each feature stands once, in
    order.
    """
    if not images:
        return None
    patch = arrays[f"{_PATCH}{place}"]
    _check_places(f"patch {place}", patch, size, images)
    return patch


def check_shown(shown: TurnImages, sampled: np.ndarray, sizes: PatchSizes) -> None:
    """Raises ValueError unless the images of a response, `sampled` bool [T], are those that a tower
    of these sizes reads, at tokens that were not sampled."""
    if not shown.images:
        raise ValueError("images, and there are none")
    for number, image in enumerate(shown.images):
        name, cut = f"image {number}", _cut(image)
        _check_image(name, image)
        count, longest = len(cut.patches), max(n for _, n in segment_runs(cut))
        fits = cut.patches.shape[1] == sizes.patch_bytes and cut.positions.shape[1] == sizes.dims
        fits = fits and count == cut.features * sizes.merge and longest <= sizes.chunk
        _check(fits and not any(n % sizes.merge for _, n in segment_runs(cut)), name, cut.patches)
    _check_places("patch", shown.patch, len(sampled), shown.images)
    if np.any(shown.patch[sampled] != -1):
        raise ValueError("features of an image at tokens that were sampled")


def sent_bytes(prompt: Prompt) -> int:
    """Bytes of the arrays of a prompt's images. ValueError for more than a worker gets at once."""
    size = sum(getattr(_cut(image), name).nbytes for image in prompt.images for name in _COLUMNS)
    if size > MOST_IMAGE_BYTES:
        raise ValueError(
            f"the images of prompt {prompt.counter} have {size >> 20} MiB of patches, and workers "
            f"get at most {MOST_IMAGE_BYTES >> 20} MiB at once: use a smaller data.image_tokens"
        )
    return size


def _image(number: int, fact: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Image:
    patches, positions, segments = (arrays[f"image{number}.{column}"] for column in _COLUMNS)
    pixels = arrays.get(f"image{number}.pixels", _NO_PIXELS)
    rows, columns = map(int, fact["grid"])
    cut = ImagePatches(patches, positions, segments, int(fact["features"]), (rows, columns))
    return Image(pixels, bytes.fromhex(fact["digest"]), cut, bool(fact["shrunk"]))


def _check_image(name: str, image: Image) -> None:
    cut = _cut(image)
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
        raise ValueError(f"a frame's {name} has {features} features of {count} patches")
    if max(rows, columns) > features:
        raise ValueError(f"a frame's {name} has {rows} x {columns} places, {features} features")
    if len(image.digest) != _DIGEST_BYTES:
        raise ValueError(f"a frame's {name} has a digest of {len(image.digest)} bytes")


def _check_places(name: str, patch: np.ndarray, size: int, images: Sequence[Image]) -> None:
    _check(patch.dtype == np.int32 and patch.shape == (size,), name, patch)
    cut = [_cut(image) for image in images]
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
        raise ValueError(f"a frame's {name} does not fit: {array.dtype}{list(array.shape)}")


def _cut(image: Image) -> ImagePatches:
    assert image.patches is not None, "the loader cuts images before they are in a prompt"
    return image.patches
