"""Images between the tokens of a response: those that an environment showed, at their places.

T tokens of a response, N patches of an image.
"""

import collections
import dataclasses
import json
import struct
from collections.abc import Iterable, Sequence

import numpy as np

from distflow_jax.images.prompt_images import rotary_positions
from distflow_jax.images.record import Image, ImagePatches

_NO_PIXELS = np.zeros((0, 0, 3), np.uint8)
_COLUMNS = (("patches", np.uint8), ("positions", np.int32), ("segments", np.int32))


@dataclasses.dataclass(frozen=True, eq=False)
class TurnImages:
    """Images that stand in T tokens, with their patches; there is one at least."""

    images: tuple[Image, ...]
    patch: np.ndarray  # int32 [T]: number of the feature over all images, -1 for text

    @property
    def cut(self) -> tuple[ImagePatches, ...]:
        """The patches of each image."""
        return tuple(image.cut for image in self.images)

    @property
    def features(self) -> int:
        """Features of all images."""
        return sum(one.features for one in self.cut)

    @property
    def nbytes(self) -> int:
        """Bytes of the patches and their places."""
        return sum(getattr(one, name).nbytes for one in self.cut for name, _ in _COLUMNS)

    @property
    def keys(self) -> list[tuple[bytes, tuple[int, ...], int]]:
        """Keys that tell images apart by content; the n-th of one picture has a key of its own."""
        known = collections.Counter[tuple[bytes, tuple[int, ...]]]()
        found = []
        for image in self.images:
            kind = image.digest, image.cut.patches.shape
            found.append((*kind, known[kind]))
            known[kind] += 1
        return found

    def rotary(self, first: int) -> np.ndarray:
        """Positions by time, row and column where the first token is at `first`, int32 [T, 3]."""
        return rotary_positions(self.patch, self.cut) + np.int32(first)

    def same_as(self, other: "TurnImages | None") -> bool:
        """Whether the other has images of the same content at the same places."""
        if other is None:
            return False
        return self.keys == other.keys and np.array_equal(self.patch, other.patch)


def joined(parts: Iterable[tuple[int, TurnImages | None]]) -> TurnImages | None:
    """The images of several runs of tokens, (tokens of a run, its images) each; None without any.

    Of a run whose images end before it the rest is text.
    """
    parts = list(parts)
    if all(part is None for _, part in parts):
        return None
    images: list[Image] = []
    columns, features = [], 0
    for count, part in parts:
        column = np.full(count, -1, np.int32)
        if part is not None:
            own = part.patch
            column[: len(own)] = np.where(own >= 0, own + features, -1)
            images += part.images
            features += part.features
        columns.append(column)
    return TurnImages(tuple(images), np.concatenate(columns))


def of_prompt(images: Sequence[Image], patch: np.ndarray | None) -> TurnImages | None:
    """The images of a prompt as those of a response, `patch` int32 [P]; None without any."""
    return TurnImages(tuple(images), patch) if images and patch is not None else None


def to_bytes(shown: TurnImages | None) -> np.ndarray:
    """Images without their previews as one array uint8 [n]; empty for None."""
    if shown is None:
        return np.zeros(0, np.uint8)
    facts = [
        {
            "digest": image.digest.hex(),
            "patches": cut.patches.shape,
            "dims": cut.positions.shape[1],
            "features": cut.features,
            "grid": cut.grid,
            "shrunk": image.shrunk,
        }
        for image, cut in zip(shown.images, shown.cut, strict=True)
    ]
    head = json.dumps([len(shown.patch), facts]).encode()
    parts = [np.asarray(shown.patch, np.int32)]
    for cut in shown.cut:
        parts += [np.asarray(getattr(cut, name), dtype) for name, dtype in _COLUMNS]
    body = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    return np.frombuffer(struct.pack("<q", len(head)) + head + body, np.uint8)


def from_bytes(blob: np.ndarray) -> TurnImages | None:
    """Inverse of `to_bytes`, of uint8 [n]; arrays are read-only."""
    if not blob.size:
        return None
    data = np.ascontiguousarray(blob).tobytes()
    (size,) = struct.unpack_from("<q", data)
    at = struct.calcsize("<q") + size
    tokens, facts = json.loads(data[at - size : at])

    def read(dtype, *shape):
        nonlocal at
        array = np.frombuffer(data, dtype, int(np.prod(shape)), at).reshape(shape)
        at += array.nbytes
        return array

    patch, images = read(np.int32, tokens), []
    for fact in facts:
        n, width = fact["patches"]
        shapes = ((n, width), (n, fact["dims"]), (n,))
        both = zip(_COLUMNS, shapes, strict=True)
        columns = [read(dtype, *shape) for (_, dtype), shape in both]
        cut = ImagePatches(*columns, fact["features"], tuple(fact["grid"]))
        images.append(Image(_NO_PIXELS, bytes.fromhex(fact["digest"]), cut, fact["shrunk"]))
    return TurnImages(tuple(images), patch)
