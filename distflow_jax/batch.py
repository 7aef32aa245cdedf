"""The two forms of data: Samples (host, ragged columns) and Rows (device, packed and static).

N samples of this process, K mini-batches (optimizer steps), R rows, L tokens per row, S sequences
per row at most.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from distflow_jax.images.record import Image


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt of the loader.

    `counter` is the place in the global order of the run, the first half of the uids of all
    responses. `row` is the place in the data set. `tokens` int32 [P]. `patch` int32 [P] says where
    images stand: which feature of the prompt's images is at a position, numbered over all of them
    in their order, and -1 for text. It is None exactly where there are no images. `messages` is the
    row's prompt if that is a conversation, as reward functions of TRL and verifiers take it.
    """

    counter: int
    row: int
    tokens: np.ndarray
    text: str  # the prompt as the model sees it, chat template applied
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    expected_length: float = 0.0  # tokens of a response, as far as known; long ones start first
    answers: tuple[np.ndarray, ...] = ()  # int32 [T] each, as step_columns.ANSWERS says
    answer_masks: tuple[np.ndarray, ...] = ()  # bool [T] of each: what is learned; (): all of it
    expected_spread: float = 0.0  # of the scores of its responses, as far as known
    images: tuple[Image, ...] = ()
    patch: np.ndarray | None = None
    label: bool | None = None  # of an unpaired row: whether the first answer is desirable
    messages: list[dict[str, Any]] | None = None


@dataclasses.dataclass
class Samples:
    """Responses of this process, one entry per response in every column.

    `response` and `response_mask` hold one array per sample. `uid` is unique over the run and keys
    the noise that sampled the response. `fields` holds every other host column by its name in the
    DAG: rollout_logp (float32 [T_i] each), version, finished, score, ...
    """

    prompt: list[Prompt]
    uid: np.ndarray  # int64 [N, 2]: counter of the prompt, number of the sample in its group
    response: list[np.ndarray]  # int32 [T_i]; the end token is part of it
    response_mask: list[np.ndarray]  # bool [T_i]; False on tokens the policy did not choose
    fields: dict[str, Sequence[Any]] = dataclasses.field(default_factory=dict)

    def __len__(self):
        return len(self.prompt)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class RowImages:
    """Images of packed prompts, in C chunks of T patches per row (images/patch_chunks.py).

    A prompt's images stand once in a row, for all its responses there.
    """

    patch: Any  # int32 [K, R, L]: which feature of the row stands at a token, -1 for text
    patches: Any  # uint8 [K, R, C, T, patch_bytes]
    positions: Any  # int32 [K, R, C, T, 2 or 3]
    segments: Any  # int32 [K, R, C, T]; 0 is padding, numbers of a chunk from 1
    rotary: Any = None  # int32 [K, R, L, 3]; None where the network takes one position per token


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """Packed sequences with static shapes: token fields [K, R, L], sequence fields [K, R, S].

    Sequence s of a row is segment s + 1; segment 0 is padding. A prompt that several responses of a
    row share is a segment above S, and their `parent`. `previous` is the index in the row whose
    hidden state predicts the token. Sequences keep their place in every field of the batch. (group,
    member) orders all sequences of a step, wherever they lie; of a preference pair member 0 is the
    chosen one.
    """

    tokens: Any  # int32 [K, R, L]
    segment: Any  # int32 [K, R, L]
    position: Any  # int32 [K, R, L]; place in the prompt + response, from 0
    previous: Any  # int32 [K, R, L]
    response_mask: Any  # bool [K, R, L]
    parent: Any  # int32 [K, R, S]; segment of the sequence's prompt (its own where not shared)
    group: Any  # int32 [K, R, S]; index of the prompt within the step
    member: Any  # int32 [K, R, S]; place of the response within its group, from 0
    valid: Any  # bool [K, R, S]
    length: Any  # int32 [K, R, S]; number of masked-in response tokens
    # int8 or int16 [K, R, L, layers, experts of a token]: those that a mixture is to send each
    # token through, -1 for its own choice; None: its own choice for all
    experts: Any = None
    images: Any = None  # RowImages; None in a run without a tower


@dataclasses.dataclass(frozen=True)
class TokenColumn:
    """Shape and dtype of a host column with an array per response: one entry per token."""

    shape: tuple[int, ...] = ()  # of one token's numbers; (): one number
    dtype: str = "float32"
    prompt: bool = False  # whether entries of the prompt come before those of the response
    fill: float = 0  # value of padding

    def entry_shape(self, prompt: int, response: int) -> tuple[int, ...]:
        """Shape of one entry, for a prompt and a response of so many tokens."""
        return (response + prompt * self.prompt, *self.shape)


ONE_NUMBER = TokenColumn()  # float32, for each token of a response


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Static sizes of one process's rows; see Rows."""

    mini_batches: int  # K
    rows: int  # R
    tokens: int  # L
    sequences: int  # S


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Prompts and responses of a process's rows, sampled here or elsewhere."""

    group: Sequence[int]  # [N], number of the prompt within the step
    member: Sequence[int]  # [N], place of the response within its group
    prompt: Sequence[np.ndarray]  # int32 [P_i] each
    response: Sequence[np.ndarray]  # int32 [T_i] each
    response_mask: Sequence[np.ndarray]  # bool [T_i] each

    def __len__(self):
        return len(self.group)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Row and slot of each sequence: the result of packing, applied to any number of fields.

    `at[k][r]` lists the sequences of a row in the order of their slots, as numbers into Sequences;
    `shared`: whether the sequences of a prompt share one copy of it within a row.
    """

    shape: RowShape
    at: tuple[tuple[tuple[int, ...], ...], ...]
    shared: bool

    def rows(self) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
        """((mini-batch, row), its sequences) of every row."""
        for k, mini in enumerate(self.at):
            for r, members in enumerate(mini):
                yield (k, r), members


def row_spans(sequences: Sequences, members: Sequence[int], placement: Placement):
    """Yields places in a row of its `members`:
    (sequence, slot, parent, prompt start or None, last prompt token, response start)."""
    start, prompt_at = 0, {}
    for slot, i in enumerate(members):
        group, size = sequences.group[i], len(sequences.prompt[i])
        if not placement.shared:
            parent, prompt_start = slot + 1, start
            start += size
            last = start - 1
        elif group in prompt_at:
            parent, last, prompt_start = *prompt_at[group], None
        else:
            parent = placement.shape.sequences + 1 + len(prompt_at)
            prompt_start = start
            start += size
            last = start - 1
            prompt_at[group] = (parent, last)
        yield i, slot, parent, prompt_start, last, start
        start += len(sequences.response[i])


def to_rows(sequences: Sequences, placement: Placement) -> Rows:
    """This process's sequences as Rows of NumPy arrays, [K, R, L] and [K, R, S]."""
    s = placement.shape
    token_shape = (s.mini_batches, s.rows, s.tokens)
    sequence_shape = (s.mini_batches, s.rows, s.sequences)
    rows = Rows(
        *(np.zeros(token_shape, np.int32) for _ in range(4)),
        response_mask=np.zeros(token_shape, bool),
        parent=np.zeros(sequence_shape, np.int32),
        group=np.zeros(sequence_shape, np.int32),
        member=np.zeros(sequence_shape, np.int32),
        valid=np.zeros(sequence_shape, bool),
        length=np.zeros(sequence_shape, np.int32),
    )
    for at, members in placement.rows():
        for i, slot, parent, prompt_start, last, start in row_spans(sequences, members, placement):
            prompt, response = sequences.prompt[i], sequences.response[i]
            size, end = len(prompt), start + len(response)
            if prompt_start is not None:
                place = slice(prompt_start, prompt_start + size)
                rows.tokens[at][place] = prompt
                rows.segment[at][place] = parent
                rows.position[at][place] = np.arange(size)
                rows.previous[at][place] = np.maximum(
                    np.arange(prompt_start, prompt_start + size) - 1, prompt_start
                )
            rows.tokens[at][start:end] = response
            rows.segment[at][start:end] = slot + 1
            rows.position[at][start:end] = np.arange(size, size + len(response))
            rows.previous[at][start:end] = np.arange(start - 1, end - 1)
            rows.previous[at][start : min(start + 1, end)] = last
            rows.response_mask[at][start:end] = sequences.response_mask[i]
            rows.parent[at][slot] = parent
            rows.group[at][slot] = sequences.group[i]
            rows.member[at][slot] = sequences.member[i]
            rows.valid[at][slot] = True
            rows.length[at][slot] = int(np.sum(sequences.response_mask[i]))
    return rows


def token_field(
    sequences: Sequences,
    placement: Placement,
    values: Sequence[np.ndarray],
    column: TokenColumn = ONE_NUMBER,
) -> np.ndarray:
    """Per-token values, one array per sequence as `column` says: [K, R, L, *column.shape].

    A prompt that several responses of a row share takes the entries of the first response.
    """
    s = placement.shape
    shape = (s.mini_batches, s.rows, s.tokens, *column.shape)
    out = np.full(shape, column.fill, column.dtype)
    for at, members in placement.rows():
        for i, _, _, prompt_start, _, start in row_spans(sequences, members, placement):
            own = values[i]
            if column.prompt:
                size = len(sequences.prompt[i])
                if prompt_start is not None:
                    out[at][prompt_start : prompt_start + size] = own[:size]
                own = own[size:]
            out[at][start : start + len(own)] = own
    return out


def sequence_field(placement: Placement, values: Sequence[float]) -> np.ndarray:
    """One number per sequence as float32 [K, R, S], 0 elsewhere."""
    s = placement.shape
    out = np.zeros((s.mini_batches, s.rows, s.sequences), np.float32)
    for at, members in placement.rows():
        for slot, i in enumerate(members):
            out[at][slot] = values[i]
    return out


def from_token_field(
    sequences: Sequences, placement: Placement, field: np.ndarray
) -> dict[int, np.ndarray]:
    """Inverse of token_field: field [K, R, L] -> values of each sequence's response, [T_i]."""
    return {
        i: field[at][start : start + len(sequences.response[i])]
        for at, members in placement.rows()
        for i, *_, start in row_spans(sequences, members, placement)
    }


def from_sequence_field(placement: Placement, field: np.ndarray) -> dict[int, np.generic]:
    """Inverse of sequence_field: field [K, R, S] -> number of each sequence."""
    return {
        i: field[at][slot] for at, members in placement.rows() for slot, i in enumerate(members)
    }
