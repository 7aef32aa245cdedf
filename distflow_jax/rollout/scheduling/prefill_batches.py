"""Batches of prefill: prompts that are read in one row, after the prefix that they share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.images.prompt_images import content_keys
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.prefill.image_programs import PromptSight
from distflow_jax.rollout.prefill.prefill import Prefix, max_prompts
from distflow_jax.rollout.prefill.prefix_cache import (
    Kept,
    PrefixCache,
    cache_budget,
    shared_length,
)
from distflow_jax.rollout.requests import RolloutStats
from distflow_jax.rollout.scheduling.encoded_images import EncodedImages


class _Waiting(NamedTuple):
    """A prompt, or one with tokens of its response, that is to be read."""

    tokens: np.ndarray  # int32 [T]
    keys: np.ndarray  # [T], by which prefixes are compared
    sight: PromptSight | None


def _keys(prompt: Prompt, tokens: np.ndarray, shown: TurnImages | None = None) -> np.ndarray:
    """Keys of tokens int32 [T], the first of which are the prompt's: the ids where all is text.

    `shown`: images behind the prompt.
    """
    if prompt.patch is None and shown is None:
        return tokens
    size = len(prompt.tokens)
    before, behind = tokens[:size], tokens[size:]
    if prompt.patch is not None:
        before = content_keys(before, prompt.patch, prompt.images)
    if shown is not None:
        end = len(shown.patch)
        seen = content_keys(behind[:end], shown.patch, shown.images)
        behind = np.concatenate([seen, behind[end:]])
    return np.concatenate([before, behind])


class PrefillBatches:
    """Reads prompts by one version of the weights until the next `load`; counts into `stats`."""

    def __init__(self, engine: RolloutEngine, params: Any, version: int, stats: RolloutStats):
        self._engine, self._stats = engine, stats
        self._params, self._version = params, version
        self._shared = PrefixCache(cache_budget(engine.config))
        self._images = EncodedImages(engine, params, stats)

    def load(self, params: Any, version: int) -> None:
        """Swaps the weights; shared prefixes of the old ones are dropped."""
        self._params, self._version = params, version
        self._images.load(params)
        self.clear()

    def clear(self) -> None:
        """Drops all shared prefixes and features of images."""
        self._shared.clear()
        self._images.clear()

    def next_row(self, waiting: Sequence[tuple[Prompt, int]], free_slots: int) -> dict[int, Prefix]:
        """Reads the first prompt, and those after it that fit into its row; by their places.

        `waiting`: (prompt, responses wanted) of each, by priority. No more prompts are read than
        there are slots for. Images are encoded before.
        """
        most = self._engine.buckets[-1]
        sights = self._images.of([prompt for prompt, _ in waiting])
        waiting = waiting[: len(sights)]
        prompts = [
            _Waiting(prompt.tokens, _keys(prompt, prompt.tokens), sight)
            for (prompt, _), sight in zip(waiting, sights, strict=True)
        ]
        kept = self._shared_prefix(prompts)
        before = 0 if kept is None else len(kept.tokens)
        row, slots = [0], free_slots - waiting[0][1]
        length = len(prompts[0].tokens) - before
        for index in range(1, len(waiting)):
            prompt, responses = prompts[index], waiting[index][1]
            if self._shared.find(self._version, prompt.keys) is not kept:
                continue  # in a row of its own kind
            length += len(prompt.tokens) - before
            full = len(row) == max_prompts(most, self._engine.config.page_size)
            if length > most or slots <= 0 or full:
                break
            row.append(index)
            slots -= responses
        return dict(zip(row, self._read([prompts[i] for i in row], kept), strict=True))

    def one(
        self,
        prompt: Prompt,
        tokens: np.ndarray,
        shown: TurnImages | None = None,
        ahead: Sequence[TurnImages | None] = (),
    ) -> Prefix:
        """Reads tokens int32 [T]: a prompt, or one with the tokens of a resumed response.

        `shown`: images of that response; `ahead`: of others that are read soon.
        """
        sight = self._images.of_sequence(prompt, shown, ahead)
        whole = _Waiting(tokens, _keys(prompt, tokens, shown), sight)
        return self._read([whole], self._shared.find(self._version, whole.keys))[0]

    def _shared_prefix(self, prompts: Sequence[_Waiting]) -> Kept | None:
        """The prefix to read the first prompt after; it is read now where that saves tokens."""
        config = self._engine.config
        if not config.prefix_tokens:
            return None
        first, *others = prompts
        kept = self._shared.find(self._version, first.keys)
        known = 0 if kept is None else len(kept.tokens)
        keys = [other.keys for other in others]
        length = shared_length(first.keys, keys, known=known, config=config)
        if first.sight is not None and self._engine.model.image_both_ways:
            # an image that is cut would not see its other part
            length = min(length, int(np.argmax(first.sight.images.patch >= 0)))
            length = 0 if length < known + config.page_size else length
        if not length:
            return kept
        self._stats.prefills += 1
        images = () if first.sight is None else (first.sight,)
        prefix = self._engine.prompts.shared_prefix(self._params, first.tokens[:length], *images)
        return self._shared.add(self._version, first.keys[:length], prefix)

    def _read(self, prompts: Sequence[_Waiting], kept: Kept | None) -> list[Prefix]:
        """Reads a row of prompts that begin with the prefix `kept`, or a long one alone."""
        after = None if kept is None else self._shared.use(kept)
        before = 0 if kept is None else len(kept.tokens)
        self._stats.prefills += 1
        self._stats.prompts += len(prompts)
        if kept is not None:
            self._stats.prefix_hits += len(prompts)
            self._stats.prefix_tokens += before * len(prompts)
        rest, sights = prompts[0].tokens[before:], [prompt.sight for prompt in prompts]
        if len(rest) <= self._engine.buckets[-1]:
            tokens = [prompt.tokens for prompt in prompts]
            return self._engine.prompts.row(self._params, tokens, after=after, sights=sights)
        prefix = self._engine.prefill(
            params=self._params,
            existing_prefix=after,
            padded_tokens=rest,
            true_length=len(rest),
            sight=sights[0],
        )
        return [prefix]
