"""Images beside packed rows: each prompt's patches once in every row in which it stands.

Images of responses, which environments showed, stand once in a row for all responses that have the
same one.

K mini-batches, R rows, L tokens per row.
"""

from collections.abc import Sequence

import numpy as np

from distflow_jax.batch import Placement, RowImages, Sequences, row_spans
from distflow_jax.images.patch_chunks import ChunkedPatches, ChunkPlan, PatchSizes, placed
from distflow_jax.images.prompt_images import PromptImages
from distflow_jax.images.record import ImagePatches
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.models.model_flops import BatchWork, with_patches

ImageKey = tuple[bytes, tuple[int, ...], int]  # of TurnImages.keys


def pack_images(
    sequences: Sequences,
    images: Sequence[PromptImages | None],
    placement: Placement,
    sizes: PatchSizes,
    shown: Sequence[TurnImages | None] = (),
) -> RowImages:
    """The images of this process's rows, NumPy arrays; `images` has one entry per sequence.

    `shown`: those of the responses, an entry per sequence, or no entry where none has images.
    """
    s = placement.shape
    token_shape = (s.mini_batches, s.rows, s.tokens)
    patch = np.full(token_shape, -1, np.int32)
    rotary = np.zeros((*token_shape, 3), np.int32) if sizes.rotary else None
    chunks = sizes.empty(*token_shape[:2])
    for at, members in placement.rows():
        here = ChunkedPatches(chunks.patches[at], chunks.positions[at], chunks.segments[at])
        plan, where = ChunkPlan(sizes), dict[int, np.ndarray]()
        of_responses: dict[ImageKey, np.ndarray] = {}
        for i, _, _, prompt_start, _, start in row_spans(sequences, members, placement):
            own, group = images[i], sequences.group[i]
            size, end = len(sequences.prompt[i]), start + len(sequences.response[i])
            if own is not None and prompt_start is not None:
                if group not in where:  # copies of a prompt that is not shared have one set
                    found = plan.add(own, here)
                    assert found is not None, "chunks_for has room for every token of a row"
                    where[group] = found
                patch[at][prompt_start : prompt_start + size] = placed(own.patch, where[group])
            turns = shown[i] if shown else None
            if turns is not None:
                found = _add(turns, plan, here, of_responses)
                patch[at][start:end] = placed(turns.patch, found)
            if rotary is None:
                continue
            first = size + (0 if own is None else own.shift)
            if prompt_start is not None:
                whole = np.arange(size, dtype=np.int32)[:, None] if own is None else own.rotary
                rotary[at][prompt_start : prompt_start + size] = whole
            if turns is None:
                rotary[at][start:end] = np.arange(first, first + end - start)[:, None]
            else:
                rotary[at][start:end] = turns.rotary(first)
    return RowImages(patch, chunks.patches, chunks.positions, chunks.segments, rotary)


def encoded_images(
    sequences: Sequences,
    images: Sequence[PromptImages | None],
    placement: Placement,
    window: int = 0,
    shown: Sequence[TurnImages | None] = (),
) -> np.ndarray:
    """Work of the tower in these rows: each image of a prompt once in each row that has it.

    So of the images `shown` in responses, see pack_images.

    Returns int64 [4]: images, patches, pairs of patches that attend to each other, and such pairs
    in the tower's layers with a `window`.
    """
    total, known = np.zeros(4, np.int64), dict[int, np.ndarray]()
    for _, members in placement.rows():
        for group, own in {sequences.group[i]: images[i] for i in members}.items():
            if own is None:
                continue
            if group not in known:
                known[group] = _work(own, own.count, window)
            total += known[group]
        of_responses: dict[ImageKey, ImagePatches] = {}
        for turns in (shown[i] for i in members if shown):
            if turns is not None:
                of_responses |= zip(turns.keys, turns.cut, strict=True)
        for cut in of_responses.values():
            total += _work(cut, 1, window)
    return total


def _work(images: PromptImages | ImagePatches, count: int, window: int) -> np.ndarray:
    """Work of encoding `count` images, int64 [4] as encoded_images has it."""
    work = with_patches(BatchWork(0, 0, 0), window, images.positions, images.segments)
    return np.array((count, work.patches, work.patch_pairs, work.window_pairs), np.int64)


def _add(
    turns: TurnImages, plan: ChunkPlan, into: ChunkedPatches, known: dict[ImageKey, np.ndarray]
) -> np.ndarray:
    """Writes patches of a response's images that the row does not have; the place of each feature,
    int32 [features]."""
    for key, cut in zip(turns.keys, turns.cut, strict=True):
        if key not in known:
            found = plan.add(cut, into)
            assert found is not None, "chunks_for has room for every token of a row"
            known[key] = found
    return np.concatenate([known[key] for key in turns.keys])
