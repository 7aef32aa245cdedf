"""Images beside packed rows: each prompt's patches once in every row in which it stands.

K mini-batches, R rows, L tokens per row.
"""

from collections.abc import Sequence

import numpy as np

from distflow_jax.batch import Placement, RowImages, Sequences, row_spans
from distflow_jax.images.patch_chunks import ChunkedPatches, ChunkPlan, PatchSizes, placed
from distflow_jax.images.prompt_images import PromptImages
from distflow_jax.models.model_flops import Work, with_patches


def pack_images(
    sequences: Sequences,
    images: Sequence[PromptImages | None],
    placement: Placement,
    sizes: PatchSizes,
) -> RowImages:
    """The images of this process's rows, NumPy arrays; `images` has one entry per sequence."""
    s = placement.shape
    token_shape = (s.mini_batches, s.rows, s.tokens)
    patch = np.full(token_shape, -1, np.int32)
    rotary = np.zeros((*token_shape, 3), np.int32) if sizes.rotary else None
    chunks = sizes.empty(*token_shape[:2])
    for at, members in placement.rows():
        here = ChunkedPatches(chunks.patches[at], chunks.positions[at], chunks.segments[at])
        plan, where = ChunkPlan(sizes), dict[int, np.ndarray]()
        for i, _, _, prompt_start, _, start in row_spans(sequences, members, placement):
            own, group = images[i], sequences.group[i]
            size, end = len(sequences.prompt[i]), start + len(sequences.response[i])
            if own is not None and prompt_start is not None:
                if group not in where:  # copies of a prompt that is not shared have one set
                    found = plan.add(own, here)
                    assert found is not None, "chunks_for has room for every token of a row"
                    where[group] = found
                patch[at][prompt_start : prompt_start + size] = placed(own.patch, where[group])
            if rotary is None:
                continue
            first = size + (0 if own is None else own.shift)
            if prompt_start is not None:
                whole = np.arange(size, dtype=np.int32)[:, None] if own is None else own.rotary
                rotary[at][prompt_start : prompt_start + size] = whole
            rotary[at][start:end] = np.arange(first, first + end - start)[:, None]
    return RowImages(patch, chunks.patches, chunks.positions, chunks.segments, rotary)


def encoded_images(
    sequences: Sequences,
    images: Sequence[PromptImages | None],
    placement: Placement,
    window: int = 0,
) -> np.ndarray:
    """Work of the tower in these rows: each image of a prompt once in each row that has it.

    Returns int64 [4]: images, patches, pairs of patches that attend to each other, and such pairs
    in the tower's layers with a `window`.
    """
    total, known = np.zeros(4, np.int64), dict[int, np.ndarray]()
    for _, members in placement.rows():
        for group, own in {sequences.group[i]: images[i] for i in members}.items():
            if own is None:
                continue
            if group not in known:
                work = with_patches(Work(0, 0, 0), window, own.positions, own.segments)
                numbers = (own.count, work.patches, work.patch_pairs, work.window_pairs)
                known[group] = np.array(numbers, np.int64)
            total += known[group]
    return total
