"""Base classes with the interface of JetStream 0.2.2, for an environment without JetStream.

engine_interface.py chooses between the two. Fields, methods and parameters have JetStream's names,
so that an engine and its callers are the same code with either. B slots, k tokens at most of a slot
and call, S samples of a slot (1 in this package).
"""

import abc
import dataclasses
from typing import Any

import jax
import numpy as np
from flax import struct


@struct.dataclass
class SlotData:
    """Tokens of one slot: `tokens` and `valid` [S, k], `lengths` [S]."""

    tokens: jax.Array | np.ndarray
    valid: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray


@struct.dataclass
class ResultTokens(abc.ABC):
    """Results of one call of `generate`, as columns of one array: they reach the host together.

    `data` is int [B * S, columns]. Each `*_idx` is the (start, stop) of its columns: tokens (k),
    which of them count (k), and the length of the response so far (1).
    """

    data: jax.Array | np.ndarray
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = struct.field(pytree_node=False)
    length_idx: tuple[int, int] = struct.field(pytree_node=False)
    samples_per_slot: int = struct.field(pytree_node=False)

    def copy_to_host_async(self) -> None:
        """Starts the transfer of `data` to the host."""
        if isinstance(self.data, jax.Array):
            self.data.copy_to_host_async()

    def convert_to_numpy(self) -> "ResultTokens":
        """The same with `data` on the host."""
        return self.replace(data=np.array(self.data))

    def get_result_at_slot(self, slot: int) -> SlotData:
        """The columns of one slot, from 0."""
        rows = self.data[slot * self.samples_per_slot : (slot + 1) * self.samples_per_slot]
        tokens, valid, length = (
            rows[:, slice(*columns)]
            for columns in (self.tokens_idx, self.valid_idx, self.length_idx)
        )
        return SlotData(tokens=tokens, valid=valid, lengths=length[:, 0])


@dataclasses.dataclass
class TokenizerParameters:
    """Description of a tokenizer: a file, and the number of ids beyond its vocabulary."""

    path: str = ""
    extra_ids: int = 0


class EngineTokenizer(abc.ABC):
    """Text to token ids and back."""

    @abc.abstractmethod
    def encode(self, s: str, **kwargs) -> tuple[jax.Array | np.ndarray, int]:
        """(ids, their number without padding) of a text."""

    @abc.abstractmethod
    def decode(self, token_ids: list[int], **kwargs) -> str:
        """The text of ids."""

    @property
    @abc.abstractmethod
    def pad_id(self) -> int:
        """Id that pads a prompt."""

    @property
    @abc.abstractmethod
    def eos_id(self) -> int:
        """Id that ends a response."""

    @property
    @abc.abstractmethod
    def bos_id(self) -> int:
        """Id that begins a text."""

    @property
    def stop_tokens(self) -> set[int]:
        """All ids after which nothing is decoded."""
        return {self.eos_id, self.pad_id}


class Engine(abc.ABC):
    """Prefill, insert and generate: what a scheduler calls to decode many responses at once.

    `prefill` reads a prompt and returns a prefix, `insert` starts a response to it in a slot of the
    decode state, and `generate` decodes tokens of all slots.
    """

    @abc.abstractmethod
    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Any = None,
        padded_tokens: jax.Array,
        true_length: int,
    ) -> Any:
        """The prefix of a prompt: the first `true_length` of `padded_tokens`, int [T].

        They follow the tokens of `existing_prefix`, if there is one.
        """

    @abc.abstractmethod
    def insert(self, prefix: Any, decode_state: Any, slot: int) -> Any:
        """The decode state with a response to the prompt in `slot`."""

    @abc.abstractmethod
    def generate(self, params: Any, decode_state: Any) -> tuple[Any, ResultTokens]:
        """The decode state after one call, and the tokens of that call."""

    @abc.abstractmethod
    def load_params(self, *args, **kwargs) -> Any:
        """The parameters as the engine takes them."""

    @abc.abstractmethod
    def init_decode_state(self, *args, **kwargs) -> Any:
        """A decode state whose slots are free."""

    @abc.abstractmethod
    def get_prefix_destination_sharding(self) -> Any:
        """Where a prefix lies before it is inserted."""

    @abc.abstractmethod
    def get_tokenizer(self) -> TokenizerParameters:
        """Description of the tokenizer."""

    @abc.abstractmethod
    def build_tokenizer(self, metadata: TokenizerParameters) -> Any:
        """The tokenizer of a description, an EngineTokenizer."""

    @property
    @abc.abstractmethod
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""

    @property
    @abc.abstractmethod
    def samples_per_slot(self) -> int:
        """Responses in one slot."""

    @property
    @abc.abstractmethod
    def max_prefill_length(self) -> int:
        """Longest prompt, in tokens."""

    @property
    @abc.abstractmethod
    def mesh(self) -> jax.sharding.Mesh:
        """The devices of the engine."""

    @property
    @abc.abstractmethod
    def colocated_cpus(self) -> list[Any] | None:
        """CPU devices beside those of the mesh; None where they are not used."""
