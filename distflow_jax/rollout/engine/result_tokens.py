"""The result of a generate call, as JetStream has it and with log-probs.

B slots, k tokens at most of a slot and call.
"""

import jax
import numpy as np
from flax import struct

from distflow_jax.rollout.decode_state import EngineConfig, result_tokens
from distflow_jax.rollout.jetstream_api import engine_api


@struct.dataclass
class RolloutTokens(engine_api.ResultTokens):
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
