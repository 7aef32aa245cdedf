"""The programs that read prompts: from token ids to prefixes that slots can answer."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.rollout.decode_state import StateShapes, check_length
from distflow_jax.rollout.prefill import prefill
from distflow_jax.rollout.prefill.image_programs import (
    ImagePrograms,
    PromptPiece,
    PromptSight,
    Sight,
    shift_of,
)
from distflow_jax.rollout.prefill.prefill import Prefix, SharedPrefix
from distflow_jax.rollout.sampler_program import sampler_program


class PrefillPrograms:
    """Reads prompts on a sampler's devices: in rows of a few lengths, long ones in chunks."""

    def __init__(self, shapes: StateShapes):
        self._shapes, self._config = shapes, shapes.config
        self.buckets = prefill.buckets(shapes.config)
        whole = NamedSharding(shapes.mesh, PartitionSpec())
        self._row = sampler_program(shapes, prefill.read_row)
        self._row_after = sampler_program(shapes, prefill.read_row_after)
        # all that a chunk is read into lies alike: else its second chunk were another program
        kept = prefill.kept_shardings(shapes)
        self._chunk = sampler_program(shapes, prefill.read_chunk, out=(kept, whole), donate=3)
        self._room = jax.jit(
            functools.partial(prefill.no_tokens, shapes), static_argnums=0, out_shardings=kept
        )
        self._widen = jax.jit(prefill.widen, static_argnums=3, out_shardings=kept)
        sizes = shapes.config.images
        # None: the model has no tower, and programs have no images among their arguments
        self.images = None if sizes is None else ImagePrograms(shapes, sizes)
        self._shifts = bool(shapes.model.rope_sections)
        self._both_ways = shapes.model.image_both_ways

    def read(
        self,
        params: Any,
        tokens: np.ndarray,
        existing: Prefix | None = None,
        sight: PromptSight | None = None,
    ) -> Prefix:
        """Reads one prompt int32 [T], or with `existing` the tokens that follow it.

        `sight`: the images of the whole prompt.
        """
        if existing is None and len(tokens) <= self.buckets[-1]:
            return self.row(params, [tokens], sights=[sight])[0]
        return self._chunks(params, tokens, existing, sight)

    def row(
        self,
        params: Any,
        prompts: Sequence[np.ndarray],
        *,
        after: Prefix | None = None,
        sights: Sequence[PromptSight | None] | None = None,
    ) -> list[Prefix]:
        """Reads several prompts, int32 [t] each, that together fit the largest of `buckets`.

        `after`: the shared prefix of all of them, from `shared_prefix`; only the tokens behind it
        are read, and have to fit. `sights`: the images of each prompt; None: all are text.
        """
        before = 0 if after is None else int(after.length)
        row = prefill.pack([prompt[before:] for prompt in prompts], self._config)
        packed = row.tokens, row.segment, row.position, row.last
        sights = sights or [None] * len(prompts)
        both = zip(row.offsets, prompts, sights, strict=True)
        pieces = [
            PromptPiece(at, before, len(prompt) - before, sight) for at, prompt, sight in both
        ]
        sight = self._sight(len(row.tokens), pieces)
        if after is None:
            shared = None
            (key, value, experts), logits = self._row(params, *packed, sight)
        else:
            shared = self._widest(after)
            (key, value, experts), logits = self._row_after(params, *packed, shared, sight)
        return [
            Prefix(
                key,
                value,
                logits,
                np.int32(i),
                np.int32(offset),
                np.int32(len(prompt)),
                prefill.known_tokens(prompt, self._config),
                shared,
                experts,
                self._shift(sights[i]),
            )
            for i, (prompt, offset) in enumerate(zip(prompts, row.offsets, strict=True))
        ]

    def _sight(self, length: int, pieces: Sequence[PromptPiece]) -> Sight | None:
        return None if self.images is None else self.images.sight(length, pieces)

    def _shift(self, sight: PromptSight | None) -> np.ndarray | None:
        return shift_of(sight) if self._shifts else None

    def shared_prefix(
        self, params: Any, tokens: np.ndarray, sight: PromptSight | None = None
    ) -> Prefix:
        """Reads the shared prefix of prompts, int32 [t], into arrays to be cached: no longer than
        `prefix_tokens`, nor than twice its own tokens (or a page)."""
        check_length(len(tokens), min(self._config.prefix_tokens, self._config.max_prompt))
        prefix = self.read(params, np.asarray(tokens, np.int32), sight=sight)
        # also where they have the size already: in one layout, rows after them are one program
        size = min(prefix.key.shape[1], prefill.shared_room(self._config))
        kept = prefill.kept_of(prefix)
        key, value, experts = self._widen(kept, prefix.offset, prefix.shared, size)
        return prefix.replace(key=key, value=value, experts=experts)

    def every_shape(self, params: Any) -> Iterator[Prefix]:
        """Runs every program once; yields a prefix of each shape that they make."""
        token = np.zeros(1, np.int32)
        if self.images is not None:
            self.images.every_shape(params, self.buckets)
        for bucket in self.buckets:
            yield self.read(params, np.zeros(bucket, np.int32))
        if prefill.takes_chunks(self._config):
            prefix = self._chunks(params, token, None)
            yield prefix
            for bucket in self.buckets:
                self._chunks(params, token, self.read(params, np.zeros(bucket, np.int32)))
            self._chunks(params, token, prefix)
        if self._config.prefix_tokens:
            yield from self._every_shape_after_shared(params)

    def trace_longest_row(self, params: Any) -> jax.stages.Traced:
        """The program that reads the longest row."""
        row = prefill.pack([np.zeros(self.buckets[-1], np.int32)], self._config)
        sight = None if self.images is None else self.images.specs(len(row.tokens))
        return self._row.trace(params, row.tokens, row.segment, row.position, row.last, sight)

    def trace_chunk(self, params: Any) -> jax.stages.Traced:
        """The program that reads a chunk of a long prompt; makes no array on a device."""
        size = self.buckets[-1]
        empty = functools.partial(prefill.no_tokens, self._shapes, prefill.chunk_room(self._config))
        layouts = prefill.kept_shardings(self._shapes)
        kept = tuple(
            None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
            for x, layout in zip(jax.eval_shape(empty), layouts, strict=True)
        )
        sight = None if self.images is None else self.images.specs(size)
        tokens, number = np.zeros(size, np.int32), np.int32(0)
        return self._chunk.trace(params, tokens, number, kept, number, sight)

    def _every_shape_after_shared(self, params: Any) -> Iterator[Prefix]:
        longest = min(self._config.prefix_tokens, self._config.max_prompt)
        token = np.zeros(1, np.int32)
        for length in sorted({longest, *(b for b in self.buckets if b < longest)}):
            kept = self.shared_prefix(params, np.zeros(length, np.int32))
            self._widest(kept)
            if prefill.takes_chunks(self._config):
                self._chunks(params, token, kept)
        kept = self.shared_prefix(params, token)
        for bucket in self.buckets:
            yield self.row(params, [np.zeros(1 + bucket, np.int32)], after=kept)[0]

    def _widest(self, prefix: Prefix) -> SharedPrefix:
        """One that is kept, with room for the longest, so that one program fits all."""
        room = prefill.shared_room(self._config)
        key, value, experts = prefill.kept_of(prefix)
        if key.shape[1] != room:
            kept = (key, value, experts)
            key, value, experts = self._widen(kept, prefix.offset, None, room)
        return SharedPrefix(key, value, prefix.length, experts)

    def _chunks(
        self,
        params: Any,
        tokens: np.ndarray,
        existing: Prefix | None,
        sight: PromptSight | None = None,
    ) -> Prefix:
        """Reads a prompt, or the tokens behind one, in chunks of the largest of `buckets`."""
        size = self.buckets[-1]
        room = prefill.chunk_room(self._config)
        before = 0 if existing is None else int(existing.length)
        known = tokens
        if existing is not None and existing.tokens is not None:
            known = np.concatenate([np.asarray(existing.tokens)[:before], tokens])
        if existing is None:
            kept = self._room(room)
        else:
            kept = prefill.kept_of(existing)
            kept = self._widen(kept, existing.offset, existing.shared, room)
        for chunk in self._cut(tokens, before, sight):
            padded = np.pad(chunk, (0, size - len(chunk)))
            here = self._sight(size, [PromptPiece(0, before, len(chunk), sight)])
            count = np.int32(len(chunk))
            kept, logits = self._chunk(params, padded, count, kept, np.int32(before), here)
            before += len(chunk)
        known = prefill.known_tokens(known, self._config)
        key, value, experts = kept
        start, length, shift = np.int32(0), np.int32(before), self._shift(sight)
        return Prefix(key, value, logits, start, start, length, known, None, experts, shift)

    def _cut(
        self, tokens: np.ndarray, before: int, sight: PromptSight | None
    ) -> Iterator[np.ndarray]:
        """Chunks of tokens int32 [T], of which `before` of the prompt were read.

        They may cut an image, unless its tokens attend to each other both ways.
        """
        size, at = self.buckets[-1], 0
        while at < len(tokens):
            end = min(at + size, len(tokens))
            if sight is not None and self._both_ways and end < len(tokens):
                end = sight.whole_until(before + at, before + end) - before
            yield tokens[at:end]
            at = end
