"""The model's tokenizer with the face that JetStream's orchestrator expects."""

import jax
import numpy as np

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rollout.jetstream_api import tokenizer_api


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Text to ids and back. `stop_ids` are the engine's, so that both end alike."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: tuple[int, ...]):
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids

    def encode(
        self, s: str, *, max_prefill_length: int | None = None, **kwargs
    ) -> tuple[jax.Array | np.ndarray, int]:
        """(ids, their number), the last `max_prefill_length` of them as JetStream cuts.

        Not padded: the engine pads to its own lengths. `is_bos` does nothing: a text holds the
        special tokens that it should, as in training.
        """
        ids = self._tokenizer.encode(s)
        if max_prefill_length is not None:
            ids = ids[-max_prefill_length:]
        return ids, len(ids)

    def decode(self, token_ids: list[int], **kwargs) -> str:
        """Ids -> text, special tokens left out."""
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        """Fills up a prompt of JetStream's; never looked at."""
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        """The first of the tokens that end a response."""
        return self._stop_ids[0]

    @property
    def bos_id(self) -> int:
        """Start of a text; the end token for a model that has no other mark between texts."""
        bos = self._tokenizer.bos_id
        return self.eos_id if bos is None else bos

    @property
    def stop_tokens(self) -> set[int]:
        """Ids that end a response. Not the pad id: the model may well write it."""
        return set(self._stop_ids)
