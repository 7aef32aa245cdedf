"""The programs that read prompts: from token ids to prefixes that slots can answer."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.rollout.decode_state import StateShapes, check_length, longest_read, pages_of
from distflow_jax.rollout.prefill import prefill
from distflow_jax.rollout.prefill.prefill import Beginning, Prefix
from distflow_jax.rollout.sampler_program import sampler_program


class PrefillPrograms:
    """Reads prompts on the devices of one sampler, in rows of a few lengths and long ones in
    pieces."""

    def __init__(self, shapes: StateShapes):
        self._config = shapes.config
        self.buckets = prefill.buckets(shapes.config)
        whole = NamedSharding(shapes.mesh, PartitionSpec())
        self._row = sampler_program(shapes, prefill.read_row)
        self._row_after = sampler_program(shapes, prefill.read_row_after)
        self._piece = sampler_program(shapes, prefill.read_piece, donate=3)
        self._room = jax.jit(
            functools.partial(prefill.no_tokens, shapes), static_argnums=0, out_shardings=whole
        )
        self._widen = jax.jit(prefill.widen, static_argnums=3, out_shardings=whole)

    def read(self, params: Any, tokens: np.ndarray, existing: Prefix | None = None) -> Prefix:
        """Reads one prompt, or with `existing` what follows it."""
        if existing is None and len(tokens) <= self.buckets[-1]:
            return self.row(params, [tokens])[0]
        return self._pieces(params, tokens, existing)

    def row(
        self, params: Any, prompts: Sequence[np.ndarray], *, after: Prefix | None = None
    ) -> list[Prefix]:
        """Reads several prompts at once, that together fit the largest of `buckets`.

        `after`: what all of them begin with, from `beginning`; only what follows it is read,
        and has to fit.
        """
        before = 0 if after is None else int(after.length)
        row = prefill.pack([prompt[before:] for prompt in prompts], self._config)
        packed = row.tokens, row.segment, row.position, row.last
        if after is None:
            beginning = None
            (key, value, experts), logits = self._row(params, *packed)
        else:
            beginning = self._widest(after)
            (key, value, experts), logits = self._row_after(params, *packed, beginning)
        return [
            Prefix(
                key,
                value,
                logits,
                np.int32(i),
                np.int32(offset),
                np.int32(len(prompt)),
                prefill.known_tokens(prompt, self._config),
                beginning,
                experts,
            )
            for i, (prompt, offset) in enumerate(zip(prompts, row.offsets, strict=True))
        ]

    def beginning(self, params: Any, tokens: np.ndarray) -> Prefix:
        """Reads what prompts begin with into arrays to be kept: no longer than the longest
        beginning, nor than twice its own tokens (or a page)."""
        check_length(len(tokens), min(self._config.prefix_tokens, self._config.max_prompt))
        prefix = self.read(params, np.asarray(tokens, np.int32))
        # also where they have the size already: in one layout, rows after them are one program
        size = min(prefix.key.shape[1], prefill.beginning_room(self._config))
        kept = prefill.kept_of(prefix)
        key, value, experts = self._widen(kept, prefix.offset, prefix.beginning, size)
        return prefix.replace(key=key, value=value, experts=experts)

    def every_shape(self, params: Any) -> Iterator[Prefix]:
        """Runs every program once; yields a prefix of each shape that they make."""
        token = np.zeros(1, np.int32)
        for bucket in self.buckets:
            yield self.read(params, np.zeros(bucket, np.int32))
        if self._takes_pieces:
            prefix = self._pieces(params, token, None)
            yield prefix
            for bucket in self.buckets:
                self._pieces(params, token, self.read(params, np.zeros(bucket, np.int32)))
            self._pieces(params, token, prefix)
        if self._config.prefix_tokens:
            yield from self._every_shape_after_beginnings(params)

    def trace_longest_row(self, params: Any) -> jax.stages.Traced:
        """The program that reads the longest row."""
        row = prefill.pack([np.zeros(self.buckets[-1], np.int32)], self._config)
        return self._row.trace(params, row.tokens, row.segment, row.position, row.last)

    @property
    def _takes_pieces(self) -> bool:
        return longest_read(self._config) > self.buckets[-1]

    def _every_shape_after_beginnings(self, params: Any) -> Iterator[Prefix]:
        longest = min(self._config.prefix_tokens, self._config.max_prompt)
        token = np.zeros(1, np.int32)
        for length in sorted({longest, *(b for b in self.buckets if b < longest)}):
            kept = self.beginning(params, np.zeros(length, np.int32))
            self._widest(kept)
            if self._takes_pieces:
                self._pieces(params, token, kept)
        kept = self.beginning(params, token)
        for bucket in self.buckets:
            yield self.row(params, [np.zeros(1 + bucket, np.int32)], after=kept)[0]

    def _widest(self, prefix: Prefix) -> Beginning:
        """One that is kept, with room for the longest, so that one program fits all."""
        room = prefill.beginning_room(self._config)
        key, value, experts = prefill.kept_of(prefix)
        if key.shape[1] != room:
            kept = (key, value, experts)
            key, value, experts = self._widen(kept, prefix.offset, None, room)
        return Beginning(key, value, prefix.length, experts)

    def _pieces(self, params: Any, tokens: np.ndarray, existing: Prefix | None) -> Prefix:
        """Reads a prompt, or what follows one, in pieces of the largest of `buckets`."""
        size = self.buckets[-1]
        room = longest_read(self._config) + size
        room = self._config.page_size * pages_of(room, self._config.page_size)
        before = 0 if existing is None else int(existing.length)
        known = tokens
        if existing is not None and existing.tokens is not None:
            known = np.concatenate([np.asarray(existing.tokens)[:before], tokens])
        if existing is None:
            kept = self._room(room)
        else:
            kept = prefill.kept_of(existing)
            kept = self._widen(kept, existing.offset, existing.beginning, room)
        for at in range(0, len(tokens), size):
            piece = tokens[at : at + size]
            padded = np.pad(piece, (0, size - len(piece)))
            kept, logits = self._piece(params, padded, np.int32(len(piece)), kept, np.int32(before))
            before += len(piece)
        known = prefill.known_tokens(known, self._config)
        key, value, experts = kept
        start, length = np.int32(0), np.int32(before)
        return Prefix(key, value, logits, start, start, length, known, experts=experts)
