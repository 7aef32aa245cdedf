"""Chunks of patches, of which a tower encodes one after another: sizes, and who stands where.

C chunks, T patches of a chunk, F features of all chunks.
"""

import dataclasses
import math

import numpy as np

from distflow_jax.images.prompt_images import PromptImages
from distflow_jax.images.record import ImagePatches

# of a chunk, so that the window numbers of models/vision/encode.py are below 2 ** 31
MOST_SEGMENTS = 2047


@dataclasses.dataclass(frozen=True)
class PatchSizes:
    """Static sizes of the patches beside a row, or before a prefill."""

    chunk: int  # T; no segment has more patches
    chunks: int  # C
    patch_bytes: int
    dims: int  # numbers of a patch's position
    merge: int  # patches of a feature
    rotary: bool = False  # whether the network takes positions by time, row and column
    # patches of a side of the tower's windows of attention, whose patches lie side by side; 0: none
    window: int = 0

    @property
    def features(self) -> int:
        """F, padding included."""
        return self.chunk * self.chunks // self.merge

    def empty(self, *rows: int) -> "ChunkedPatches":
        """Chunks without a patch, with the dims `rows` in front."""
        shape = (*rows, self.chunks, self.chunk)
        return ChunkedPatches(
            np.zeros((*shape, self.patch_bytes), np.uint8),
            np.zeros((*shape, self.dims), np.int32),
            np.zeros(shape, np.int32),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkedPatches:
    """Patches in chunks; any dims may come before those of chunks."""

    patches: np.ndarray  # uint8 [C, T, patch_bytes]
    positions: np.ndarray  # int32 [C, T, dims]
    segments: np.ndarray  # int32 [C, T]: 0 is padding; numbers of a chunk, from 1


def chunks_for(features: int, merge: int, chunk: int) -> int:
    """C: chunks into which first-fit places any images of so many features together.

    All chunks but one are more than half full, or there is one.
    """
    patches = features * merge
    return 1 if patches <= chunk else math.ceil(2 * patches / chunk)


def segment_runs(images: PromptImages | ImagePatches) -> list[tuple[int, int]]:
    """(first patch, patches) of each segment of a prompt or an image, in order."""
    change = np.flatnonzero(np.diff(images.segments)) + 1
    edges = [0, *change.tolist(), len(images.segments)]
    return list(zip(edges[:-1], np.diff(edges).tolist(), strict=True))


class ChunkPlan:
    """Places segments in chunks by first-fit, prompt after prompt."""

    def __init__(self, sizes: PatchSizes):
        self.sizes = sizes
        self._filled = [0] * sizes.chunks
        self._numbers = [0] * sizes.chunks  # of the last segment of each

    def add(self, images: PromptImages | ImagePatches, into: ChunkedPatches) -> np.ndarray | None:
        """Writes the patches of a prompt, or of one image; the place among F of each of its
        features, int32 [features].

        Patches of a window lie side by side, so that tiles of other windows can be left out. None,
        and nothing is written, where they do not fit any more.
        """
        filled, numbers = list(self._filled), list(self._numbers)
        runs, places = segment_runs(images), []
        for _, count in runs:
            free = (c for c, n in enumerate(filled) if n + count <= self.sizes.chunk)
            chunk = next((c for c in free if numbers[c] < MOST_SEGMENTS), None)
            if chunk is None:
                return None
            numbers[chunk] += 1
            places.append((chunk, filled[chunk], numbers[chunk]))
            filled[chunk] += count
        self._filled, self._numbers, where = filled, numbers, []
        for (first, count), (chunk, start, number) in zip(runs, places, strict=True):
            target = slice(start, start + count)
            order = self._order(images.positions[first : first + count])
            source = first + _patches_of(order, self.sizes.merge)
            into.patches[chunk, target] = images.patches[source]
            into.positions[chunk, target] = images.positions[source]
            into.segments[chunk, target] = number
            feature = (chunk * self.sizes.chunk + start) // self.sizes.merge
            where.append(feature + np.argsort(order).astype(np.int32))
        return np.concatenate(where)

    def _order(self, positions: np.ndarray) -> np.ndarray:
        """The features of a segment by windows, int [features]; positions int32 [N, dims]."""
        of_feature = positions[:: self.sizes.merge]
        if not self.sizes.window:
            return np.arange(len(of_feature))
        row, column = (of_feature[:, :2] // self.sizes.window).T
        return np.lexsort((column, row))


def _patches_of(order: np.ndarray, merge: int) -> np.ndarray:
    """The patches of features int [F], side by side, int [F * merge]."""
    return (order[:, None] * merge + np.arange(merge)).reshape(-1)


def placed(patch: np.ndarray, where: np.ndarray) -> np.ndarray:
    """A prompt's column `patch` int32 [P] by places among F, `where` int32 [features]."""
    return np.where(patch >= 0, where[np.maximum(patch, 0)], -1).astype(np.int32)
