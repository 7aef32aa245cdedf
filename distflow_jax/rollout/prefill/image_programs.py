"""Images of prompts on a sampler: encoded before their prompts are read, then put at their tokens.

T tokens of a row, S features of an encoded batch, W their width, N features of DeepStack's layers.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.images.patch_chunks import ChunkPlan, PatchSizes
from distflow_jax.images.prompt_images import PromptImages
from distflow_jax.models.transformer import Seen
from distflow_jax.models.vision.chunks import encode_chunks
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.rollout.decode_state import StateShapes
from distflow_jax.rollout.sampler_program import sampler_program


@struct.dataclass
class Sight:
    """Images at the tokens of one row."""

    patch: Any  # int32 [T]: the token's own place, -1 for text
    features: Any  # [1 + N, T, W]: at their tokens
    rotary: Any = None  # int32 [T, 3]; None where the network takes one position per token
    image: Any = None  # int32 [T]: number of the image, 0 for text; where these attend both ways

    @property
    def seen(self) -> Seen:
        """As the network takes it, with one row."""
        deep = self.features[None, 1:] if self.features.shape[0] > 1 else None
        return Seen(self.patch[None], self.features[:1], deep)


@dataclasses.dataclass(frozen=True, eq=False)
class PromptSight:
    """Images of a prompt, or of one with a part of its response, with their features.

    Features lie in the batches that encoded them, among those of others.
    """

    images: PromptImages
    features: tuple[jax.Array, ...]  # [1 + N, S, W] each: batches, every one once
    batch: np.ndarray  # int32 [features]: number of the batch that has it
    where: np.ndarray  # int32 [features]: place of each feature among S

    def whole_until(self, first: int, end: int) -> int:
        """The last place up to `end` that cuts no image; tokens from `first` on are read."""
        patch, segments = self.images.patch, self.images.segments
        merge, at = len(segments) // self.images.features, end
        while first < at < len(patch) and min(patch[at - 1], patch[at]) >= 0:
            if segments[patch[at - 1] * merge] != segments[patch[at] * merge]:
                break
            at -= 1
        if at == first:
            raise ValueError(
                f"an image is longer than the {end - first} tokens that are read at a time, and "
                "its tokens attend to each other: raise rollout.prefill_tokens"
            )
        return at


def joined_sight(images: PromptImages, parts: Sequence[PromptSight]) -> PromptSight:
    """The `parts`, whose features follow each other in `images`, as one."""
    batches = {id(x): x for part in parts for x in part.features}
    number = {key: n for n, key in enumerate(batches)}
    of_part = [np.array([number[id(x)] for x in part.features], np.int32) for part in parts]
    return PromptSight(
        images,
        tuple(batches.values()),
        np.concatenate([own[part.batch] for own, part in zip(of_part, parts, strict=True)]),
        np.concatenate([part.where for part in parts]),
    )


class PromptPiece(NamedTuple):
    """The part of a row that reads a prompt's tokens from `first` on."""

    at: int  # its first token in the row
    first: int  # tokens of the prompt before
    count: int
    sight: PromptSight | None


def encode_batch(shapes: StateShapes, params, patches, positions, segments):
    """Features [1 + N, S, W] of patches in chunks, uint8 [C, T, patch_bytes], with positions int32
    [C, T, 2] and segments int32 [C, T]."""
    with use_mesh(shapes.mesh):
        rows = (x[None] for x in (patches, positions, segments))
        dtype, form = jnp.dtype(shapes.config.dtype), shapes.config.tower
        found = encode_chunks(shapes.model.vision, params["vision"], *rows, dtype=dtype, form=form)
        return found[0]


def _put(row, features, index):
    """`row` [1 + N, T, W] with features [1 + N, S, W] at index int32 [T], -1 for none."""
    taken = features[:, jnp.maximum(index, 0)]
    return jnp.where(index[None, :, None] >= 0, taken, row)


class ImagePrograms:
    """Encodes images on a sampler's devices, and lays features out in rows of prompts."""

    def __init__(self, shapes: StateShapes, sizes: PatchSizes):
        self._shapes, self.sizes = shapes, sizes
        whole = NamedSharding(shapes.mesh, PartitionSpec())
        self._encode = sampler_program(shapes, encode_batch, out=whole)
        self._put = jax.jit(_put, out_shardings=whole)
        nothing = jax.jit(self._nothing, static_argnums=0, out_shardings=whole)
        self._blank = functools.cache(nothing)

    def _nothing(self, length: int) -> jax.Array:
        vision, dtype = self._shapes.model.vision, jnp.dtype(self._shapes.config.dtype)
        return jnp.zeros((1 + len(vision.deepstack), length, vision.width), dtype)

    def encode(self, params: Any, prompts: Sequence[PromptImages]) -> list[PromptSight]:
        """Encodes the images of the first prompt, and of those after it as far as they fit."""
        plan, chunks, places = ChunkPlan(self.sizes), self.sizes.empty(), []
        for images in prompts:
            where = plan.add(images, chunks)
            if where is None:
                break
            places.append(where)
        if not places:
            raise ValueError(
                f"a prompt's images have {prompts[0].features} features, and a sampler has room "
                f"for {self.sizes.features}: lower data.image_tokens or images of the prompt"
            )
        features = self._encode(params, chunks.patches, chunks.positions, chunks.segments)
        both = zip(prompts, places, strict=False)
        return [
            PromptSight(images, (features,), np.zeros_like(where), where) for images, where in both
        ]

    def trace(self, params: Any) -> jax.stages.Traced:
        """The program that encodes images; makes no array on a device."""
        chunks = self.sizes.empty()
        return self._encode.trace(params, chunks.patches, chunks.positions, chunks.segments)

    def sight(self, length: int, pieces: Sequence[PromptPiece]) -> Sight:
        """The images in a row of `length` tokens."""
        model, patch = self._shapes.model, np.full(length, -1, np.int32)
        rotary = np.zeros((length, 3), np.int32) if model.rope_sections else None
        image = np.zeros(length, np.int32) if model.image_both_ways else None
        index: dict[int, np.ndarray] = {}
        batches: dict[int, jax.Array] = {}
        last = 0
        for piece in pieces:
            here = slice(piece.at, piece.at + piece.count)
            if rotary is not None:
                rotary[here] = _rotary(piece)
            if piece.sight is None:
                continue
            images, places = piece.sight.images, np.arange(length, dtype=np.int32)[here]
            of_prompt = images.patch[piece.first : piece.first + piece.count]
            own = np.full(piece.count, -1, np.int32)
            own[: len(of_prompt)] = of_prompt  # the rest is of a response
            patch[here] = np.where(own >= 0, places, -1)
            found = piece.sight.where[np.maximum(own, 0)]
            number = np.where(own >= 0, piece.sight.batch[np.maximum(own, 0)], -1)
            for n, batch in enumerate(piece.sight.features):
                if (number == n).any():
                    batches[id(batch)] = batch
                    at = index.setdefault(id(batch), np.full(length, -1, np.int32))
                    at[here] = np.where(number == n, found, -1)
            if image is not None:
                merge = self.sizes.merge
                number = images.segments[::merge][np.maximum(own, 0)] + last
                image[here] = np.where(own >= 0, number, 0)
                last += int(images.segments.max())
        features = self._blank(length)
        for key, batch in batches.items():
            features = self._put(features, batch, index[key])
        return Sight(patch, features, rotary, image)

    def specs(self, length: int) -> Sight:
        """Shapes of the images in a row of `length` tokens; makes no array on a device."""
        model, blank = self._shapes.model, jax.eval_shape(lambda: self._nothing(length))
        whole = NamedSharding(self._shapes.mesh, PartitionSpec())

        def ints(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        return Sight(
            ints(length),
            jax.ShapeDtypeStruct(blank.shape, blank.dtype, sharding=whole),
            ints(length, 3) if model.rope_sections else None,
            ints(length) if model.image_both_ways else None,
        )

    def every_shape(self, params: Any, lengths: Sequence[int]) -> None:
        """Runs every program once; `lengths`: of all rows that are compiled, tokens."""
        chunks = self.sizes.empty()
        features = self._encode(params, chunks.patches, chunks.positions, chunks.segments)
        for length in lengths:
            self._put(self._blank(length), features, np.full(length, -1, np.int32))


def shift_of(sight: PromptSight | None) -> np.ndarray:
    """The position behind a prompt less its tokens, an int32 scalar."""
    return np.int32(0 if sight is None else sight.images.shift)


def _rotary(piece: PromptPiece) -> np.ndarray:
    """Positions of a piece's tokens by time, row and column, int32 [count, 3]."""
    place = np.arange(piece.first, piece.first + piece.count, dtype=np.int32)
    if piece.sight is None:
        return np.repeat(place[:, None], 3, axis=1)
    known = piece.sight.images.rotary
    behind = np.repeat((place + shift_of(piece.sight))[:, None], 3, axis=1)
    inside = place < len(known)
    return np.where(inside[:, None], known[np.minimum(place, len(known) - 1)], behind)
