"""The faces that JetStream expects: results of a generate call, with log-probs, and a tokenizer.

B slots, k tokens at most of a slot and call.
"""

import jax
import numpy as np
from flax import struct

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rollout.decode_state import EngineConfig, result_tokens
from distflow_jax.rollout.engine_interface import EngineTokenizer, ResultTokens


@struct.dataclass
class RolloutTokens(ResultTokens):
    """ResultTokens whose data also carries log-probs, margins (as float bits) and the counters."""

    logp_idx: tuple[int, int] = struct.field(pytree_node=False, default=(0, 0))
    margin_idx: tuple[int, int] = struct.field(pytree_node=False, default=(0, 0))
    speculation_idx: tuple[int, int] = struct.field(pytree_node=False, default=(0, 0))

    @classmethod
    def of(cls, data: jax.Array, config: EngineConfig) -> "RolloutTokens":
        """The columns of `data`, int32 [B, columns] as decode.generate returns it, B slots."""
        r = result_tokens(config)
        counted = 2 if config.speculative_tokens else 0
        return cls(
            data=data,
            tokens_idx=(0, r),
            valid_idx=(r, 2 * r),
            length_idx=(2 * r, 2 * r + 1),
            samples_per_slot=1,
            logp_idx=(2 * r + 1, 3 * r + 1),
            margin_idx=(3 * r + 1, 4 * r + 1),
            speculation_idx=(4 * r + 1, 4 * r + 1 + counted),
        )

    def convert_to_numpy(self) -> "RolloutTokens":
        """The same on the host, in one transfer."""
        return self.replace(data=np.asarray(self.data))

    def logp(self) -> np.ndarray:
        """Log-probs of the tokens, float32 [B, k]; defined where valid. Host data only."""
        start, stop = self.logp_idx
        return np.ascontiguousarray(self.data[:, start:stop]).view(np.float32)

    def margin(self) -> np.ndarray:
        """Lead of each token over the runner-up in perturbed logits, float32 [B, k]."""
        start, stop = self.margin_idx
        return np.ascontiguousarray(self.data[:, start:stop]).view(np.float32)

    def speculation(self) -> np.ndarray:
        """Tokens guessed for each slot and how many of these held, int [B, 2]; [B, 0] where off."""
        return self.data[:, slice(*self.speculation_idx)]

    def counts(self) -> np.ndarray:
        """Tokens of each slot, int [B]."""
        return self.data[:, slice(*self.valid_idx)].sum(1)

    def active(self) -> np.ndarray:
        """Which slots go on, bool [B]."""
        return self.data[:, -2] > 0

    def unfed(self) -> np.ndarray:
        """Which slots go on and have a token to be fed before they draw, bool [B]."""
        return self.data[:, -2] > 1

    def free_pages(self) -> np.ndarray:
        """Free pages of each slot's data rank, int [B]."""
        return self.data[:, -1]


class JetStreamTokenizer(EngineTokenizer):
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
