"""Images in frames: patches and places, those of a prompt once per frame.

P tokens of a prompt, N patches of an image. Previews are sent only where environments read them;
samplers do not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.images.record import Image, ImagePatches
from distflow_jax.images.record_checks import check_image, check_places

_PATCH = "patch"  # of the arrays, before a group's place
_COLUMNS = ("patches", "positions", "segments")  # of an image, behind its number
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
        cut = image.cut
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
        check_image(f"image {number}", image)
    cut = [image.cut for image in found]
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
    check_places(f"patch {place}", patch, size, images)
    return patch


def sent_bytes(prompt: Prompt) -> int:
    """Bytes of the arrays of a prompt's images. ValueError for more than a worker gets at once."""
    size = sum(getattr(image.cut, name).nbytes for image in prompt.images for name in _COLUMNS)
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
