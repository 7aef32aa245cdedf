"""Batches of prefill: prompts that are read in one row, after the prefix that they share."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.prefill.prefill import Prefix, max_prompts
from distflow_jax.rollout.prefill.prefix_cache import (
    Kept,
    PrefixCache,
    cache_budget,
    shared_length,
)
from distflow_jax.rollout.requests import RolloutStats


class PrefillBatches:
    """Reads prompts by one version of the weights until the next `load`; counts into `stats`."""

    def __init__(self, engine: RolloutEngine, params: Any, version: int, stats: RolloutStats):
        self._engine, self._stats = engine, stats
        self._params, self._version = params, version
        self._shared = PrefixCache(cache_budget(engine.config))

    def load(self, params: Any, version: int) -> None:
        """Swaps the weights; shared prefixes of the old ones are dropped."""
        self._params, self._version = params, version
        self.clear()

    def clear(self) -> None:
        """Drops all shared prefixes."""
        self._shared.clear()

    def next_row(
        self, waiting: Sequence[tuple[np.ndarray, int]], free_slots: int
    ) -> dict[int, Prefix]:
        """Reads the first prompt, and those after it that fit into its row; by their places.

        `waiting`: (tokens int32 [T], responses wanted) of each prompt, by priority. No more prompts
        are read than there are slots for.
        """
        most = self._engine.buckets[-1]
        prompts = [tokens for tokens, _ in waiting]
        kept = self._shared_prefix(prompts)
        before = 0 if kept is None else len(kept.tokens)
        row, slots = [0], free_slots - waiting[0][1]
        length = len(prompts[0]) - before
        for index in range(1, len(waiting)):
            tokens, responses = waiting[index]
            if self._shared.find(self._version, tokens) is not kept:
                continue  # in a row of its own kind
            length += len(tokens) - before
            full = len(row) == max_prompts(most, self._engine.config.page_size)
            if length > most or slots <= 0 or full:
                break
            row.append(index)
            slots -= responses
        return dict(zip(row, self._read([prompts[i] for i in row], kept), strict=True))

    def one(self, tokens: np.ndarray) -> Prefix:
        """Reads tokens int32 [T]: one prompt, or one with the tokens of a resumed response."""
        return self._read([tokens], self._shared.find(self._version, tokens))[0]

    def _shared_prefix(self, prompts: Sequence[np.ndarray]) -> Kept | None:
        """The prefix to read the first prompt after; it is read now where that saves tokens."""
        config = self._engine.config
        if not config.prefix_tokens:
            return None
        kept = self._shared.find(self._version, prompts[0])
        known = 0 if kept is None else len(kept.tokens)
        length = shared_length(prompts[0], prompts[1:], known=known, config=config)
        if not length:
            return kept
        tokens = prompts[0][:length]
        self._stats.prefills += 1
        prefix = self._engine.prompts.shared_prefix(self._params, tokens)
        return self._shared.add(self._version, tokens, prefix)

    def _read(self, prompts: Sequence[np.ndarray], kept: Kept | None) -> list[Prefix]:
        """Reads a row of prompts that begin with the prefix `kept`, or a long one alone."""
        after = None if kept is None else self._shared.use(kept)
        before = 0 if kept is None else len(kept.tokens)
        self._stats.prefills += 1
        self._stats.prompts += len(prompts)
        if kept is not None:
            self._stats.prefix_hits += len(prompts)
            self._stats.prefix_tokens += before * len(prompts)
        rest = prompts[0][before:]
        if len(rest) <= self._engine.buckets[-1]:
            return self._engine.prompts.row(self._params, prompts, after=after)
        prefix = self._engine.prefill(
            params=self._params, existing_prefix=after, padded_tokens=rest, true_length=len(rest)
        )
        return [prefix]
