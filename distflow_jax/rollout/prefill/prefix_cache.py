"""Shared prefixes of prompts, a system prompt above all: read once and cached; and their memory.

Tokens are compared by their keys: ids, and hashes of content where images stand (`content_keys`).
Which prefixes are cached depends on tokens alone: all processes that share an engine decide alike.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.moe import recorded_dtype
from distflow_jax.rollout.decode_state import EngineConfig, pages_of
from distflow_jax.rollout.prefill.prefill import (
    Prefix,
    buckets,
    chunk_room,
    shared_room,
    takes_chunks,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A cached shared prefix."""

    version: int  # of the weights that read it
    tokens: np.ndarray  # int32 [n], or int64: keys of the tokens
    prefix: Prefix


class PrefixCache:
    """Shared prefixes by weight version and tokens; the least recently used makes room.

    `budget`: tokens of all their arrays together, padding included.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self._kept: list[Kept] = []  # the least recently used first

    @property
    def tokens(self) -> int:
        """Room that is taken, in tokens."""
        return sum(_room(kept.prefix) for kept in self._kept)

    def find(self, version: int, tokens: np.ndarray) -> Kept | None:
        """The longest one that `tokens` [T] begin with and go on after; read by these weights."""
        found = [
            kept
            for kept in self._kept
            if kept.version == version
            and len(kept.tokens) < len(tokens)
            and np.array_equal(kept.tokens, tokens[: len(kept.tokens)])
        ]
        return max(found, key=lambda kept: len(kept.tokens), default=None)

    def use(self, kept: Kept) -> Prefix:
        """Its keys and values; it is the most recently used one now."""
        self._kept.remove(kept)
        self._kept.append(kept)
        return kept.prefix

    def add(self, version: int, tokens: np.ndarray, prefix: Prefix) -> Kept:
        """Caches the prefix of `tokens` [n]. ValueError where it exceeds the budget alone."""
        if _room(prefix) > self.budget:
            raise ValueError(
                f"a shared prefix that takes room for {_room(prefix)} tokens is above the cache's "
                f"{self.budget}"
            )
        self._kept = [
            kept
            for kept in self._kept
            if kept.version != version or not np.array_equal(kept.tokens, tokens)
        ]
        while self.tokens + _room(prefix) > self.budget:
            self._kept.pop(0)
        self._kept.append(Kept(version, np.array(tokens), prefix))
        return self._kept[-1]

    def clear(self) -> None:
        """Drops all shared prefixes."""
        self._kept.clear()


def check_prefix_cache(config: EngineConfig) -> None:
    """ValueError for a budget that no shared prefix fits into."""
    if config.prefix_tokens and config.prefix_tokens < config.page_size:
        raise ValueError(
            f"rollout.prefix_tokens {config.prefix_tokens} must be 0 (off) or at least the page "
            f"size of {config.page_size} tokens: shorter shared prefixes are not kept"
        )


def cache_budget(config: EngineConfig) -> int:
    """Tokens that the cache of shared prefixes has room for: `prefix_tokens` in whole pages."""
    return config.page_size * pages_of(config.prefix_tokens, config.page_size)


def shared_length(
    prompt: np.ndarray, others: Sequence[np.ndarray], *, known: int, config: EngineConfig
) -> int:
    """How much of `prompt` [T] to read apart, for itself and the `others` that begin alike.

    The n that saves most, where it saves anything, else 0: the m prompts that begin with n tokens,
    of which `known` are kept already, need m (n - known) fewer, and one row of n, as long as the
    rows that are compiled, is read more. n adds a page at least: what differs early is read whole.
    """
    longest = min(config.prefix_tokens, len(prompt) - 1)
    shared = np.sort([min(_common(prompt, other), len(other) - 1, longest) for other in others])
    if not len(shared):
        return 0
    # between two of these, one token more costs nothing
    sizes = [*buckets(config), *range(buckets(config)[-1], longest + 1, buckets(config)[-1])]
    best, most = 0, 0
    for n in sorted({*map(int, shared), *(size for size in sizes if size <= shared[-1])}):
        if n < known + config.page_size:
            continue
        prompts = 1 + len(shared) - int(np.searchsorted(shared, n))
        saved = prompts * (n - known) - _row_tokens(n, config)
        if saved > 0 and saved >= most:
            best, most = n, saved
    return best


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _row_tokens(count: int, config: EngineConfig) -> int:
    """Tokens, padding included, of the rows or chunks that read so many."""
    sizes = buckets(config)
    return next((size for size in sizes if size >= count), sizes[-1] * pages_of(count, sizes[-1]))


def _room(prefix: Prefix) -> int:
    return prefix.key.shape[1]


def reading_bytes(model: DecoderConfig, config: EngineConfig, tensor: int) -> int:
    """Bytes on one of `tensor` devices of long prompts that are being read, beside the cache; 0
    where rows are long enough for every prompt.

    A prompt that is read in chunks has room for the longest. Two exist at a time: one that slots
    have still to take, or that is resumed, and the one that is read.
    """
    if not takes_chunks(config):
        return 0
    return 2 * chunk_room(config) * _prompt_token_bytes(model, config, tensor)


def shared_bytes(model: DecoderConfig, config: EngineConfig, tensor: int) -> int:
    """Bytes on one of `tensor` devices of shared prefixes: all that are cached, and one that is
    copied into room for the longest."""
    if not config.prefix_tokens:
        return 0
    tokens = cache_budget(config) + shared_room(config)
    return tokens * _prompt_token_bytes(model, config, tensor)


def _prompt_token_bytes(model: DecoderConfig, config: EngineConfig, tensor: int) -> int:
    """Bytes of a token outside of the cache, on one of `tensor` devices."""
    heads = model.num_kv_heads
    heads = heads // tensor if heads % tensor == 0 else heads
    experts = 0
    if config.record_experts:
        experts = model.experts_per_token * recorded_dtype(model.num_experts).itemsize
    keys = heads * model.head_dim * jnp.dtype(config.dtype).itemsize
    return model.num_layers * (2 * keys + experts)
