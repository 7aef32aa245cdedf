"""The two forms of data: Samples (host, ragged columns) and Rows (device, packed and static).

N samples of this process, K mini-batches (optimizer steps), R rows, L tokens per row, S sequences
per row at most.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt as the loader issues it.

    `counter` is its place in the global order of the run (the first half of every uid made from
    it). `row` is its place in the data set. `tokens` int32 [P].
    """

    counter: int
    row: int
    tokens: np.ndarray
    text: str  # the prompt as the model sees it, chat template applied
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclasses.dataclass
class Samples:
    """Responses of this process, one entry per response in every column.

    `response` and `response_mask` hold one array per sample. `sample` is the index within the
    group, so that uid = (counter, sample) is unique over the run. `fields` holds every other host
    column by its name in the DAG: rollout_logp (float32 [T_i] each), version, finished, score, ...
    """

    prompt: list[Prompt]
    sample: np.ndarray  # int32 [N]
    response: list[np.ndarray]  # int32 [T_i]; the end token is part of it
    response_mask: list[np.ndarray]  # bool [T_i]; False on tokens the policy did not choose
    fields: dict[str, Sequence[Any]] = dataclasses.field(default_factory=dict)

    def __len__(self):
        return len(self.prompt)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """Packed sequences with static shapes: token fields [K, R, L], sequence fields [K, R, S].

    Sequence s of a row is segment s + 1; segment 0 is padding. A prompt that several responses of a
    row share is a segment above S, and their `parent`. `previous` is the index in the row whose
    hidden state predicts the token. Sequences keep their place in every field of the batch.
    """

    tokens: Any  # int32 [K, R, L]
    segment: Any  # int32 [K, R, L]
    position: Any  # int32 [K, R, L]; place in the prompt + response, from 0
    previous: Any  # int32 [K, R, L]
    response_mask: Any  # bool [K, R, L]
    parent: Any  # int32 [K, R, S]; segment of the sequence's prompt (its own where not shared)
    group: Any  # int32 [K, R, S]; index of the prompt within the step
    valid: Any  # bool [K, R, S]
    length: Any  # int32 [K, R, S]; number of masked-in response tokens


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Static sizes of one process's rows; see Rows."""

    mini_batches: int  # K
    rows: int  # R
    tokens: int  # L
    sequences: int  # S


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where each sample lies: the result of packing, applied to any number of fields.

    `sample_at[k][r]` lists the samples of a row in the order of their slots; `shared` tells whether
    the samples of one prompt share one copy of it within a row.
    """

    shape: RowShape
    sample_at: tuple[tuple[tuple[int, ...], ...], ...]
    shared: bool


def first_fit_decreasing(
    prompt_length: np.ndarray,
    response_length: np.ndarray,
    group: np.ndarray,
    *,
    row_tokens: int,
    row_sequences: int,
    shared: bool,
) -> list[list[int]]:
    """Packs sequences into as few rows as first-fit finds, longest groups first.

    All arguments int [N]. With `shared` a sequence whose prompt already lies in a row costs only
    its response there; such rows are tried first, and a whole group goes into one row where it
    fits. A row is opened only when no other has room, so every row but the last holds at least
    min(S, L // longest sequence) sequences: the bound behind `rows_needed`.
    """
    order: dict[int, list[int]] = {}
    for i in np.argsort(-response_length, kind="stable"):
        order.setdefault(int(group[i]) if shared else int(i), []).append(int(i))
    cost = {g: int(prompt_length[m[0]]) + int(response_length[m].sum()) for g, m in order.items()}
    rows: list[list[int]] = []
    free: list[int] = []
    holds: list[set[int]] = []

    def place(row, members, key, tokens):
        rows[row].extend(members)
        free[row] -= tokens
        holds[row].add(key)

    for key in sorted(order, key=lambda g: (-cost[g], g)):
        members = order[key]
        whole = (
            r
            for r in range(len(rows))
            if free[r] >= cost[key] and len(rows[r]) + len(members) <= row_sequences
        )
        row = next(whole, None)
        if row is not None:
            place(row, members, key, cost[key])
            continue
        for i in members:
            response, full = int(response_length[i]), int(prompt_length[i] + response_length[i])
            if full > row_tokens:
                raise ValueError(
                    f"a sequence of {full} tokens does not fit a row of {row_tokens}; raise "
                    f"training.row_tokens"
                )
            price = [response if key in holds[r] else full for r in range(len(rows))]
            room = [
                r for r in range(len(rows)) if free[r] >= price[r] and len(rows[r]) < row_sequences
            ]
            row = min(room, key=lambda r: (key not in holds[r], r), default=None)
            if row is None:
                rows.append([])
                free.append(row_tokens)
                holds.append(set())
                row = len(rows) - 1
                price.append(full)
            place(row, [i], key, price[row])
    return rows


def rows_needed(num_sequences: int, longest: int, row_tokens: int, row_sequences: int) -> int:
    """Upper bound on the rows that first_fit_decreasing opens for lengths up to `longest`."""
    per_row = max(1, min(row_sequences, row_tokens // longest))
    return -(-num_sequences // per_row)


def deal_rows(cost: Sequence[float], ranks: int) -> list[list[int]]:
    """Rows -> ranks, so that counts differ by at most one and costs are near equal.

    Costliest first, each to the least loaded rank among those with the fewest rows.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for row in sorted(range(len(cost)), key=lambda r: (-cost[r], r)):
        rank = min(range(ranks), key=lambda q: (len(dealt[q]), load[q], q))
        dealt[rank].append(row)
        load[rank] += cost[row]
    return dealt


def pack(
    samples: Samples,
    shape: RowShape,
    *,
    ranks: int,
    prompts_per_step: int,
    attention_cost: float,
    shared: bool,
) -> Placement:
    """Decides where each sample goes; pure and the same for the same lengths.

    Prompts are dealt to mini-batches first (by their place in the step), then packed. `ranks`: data
    ranks of this process; rank r owns rows [r R / ranks, (r + 1) R / ranks). `attention_cost`: cost
    of one attended token pair in units of one token's other work, so that rows dealt to ranks weigh
    tokens + attention_cost * sum(length^2).
    """
    prompt = np.array([len(p.tokens) for p in samples.prompt], np.int64)
    response = np.array([len(r) for r in samples.response], np.int64)
    group = np.array([p.counter % prompts_per_step for p in samples.prompt], np.int64)
    mini = group * shape.mini_batches // prompts_per_step
    per_rank = shape.rows // ranks
    result = []
    for k in range(shape.mini_batches):
        chosen = np.flatnonzero(mini == k)
        packed = first_fit_decreasing(
            prompt[chosen],
            response[chosen],
            group[chosen],
            row_tokens=shape.tokens,
            row_sequences=shape.sequences,
            shared=shared,
        )
        rows = [[int(chosen[i]) for i in row] for row in packed]
        length = [prompt[row] + response[row] for row in rows]
        cost = [float(n.sum() + attention_cost * np.square(n).sum()) for n in length]
        placed: list[tuple[int, ...]] = [()] * shape.rows
        for rank, mine in enumerate(deal_rows(cost, ranks)):
            assert len(mine) <= per_rank, (len(mine), per_rank)
            for slot, row in enumerate(mine):
                placed[rank * per_rank + slot] = tuple(sorted(rows[row]))
        result.append(tuple(placed))
    return Placement(shape, tuple(result), shared)


def _row_parts(samples: Samples, members: Sequence[int], first_shared_segment: int, shared: bool):
    """Yields (sample, segment, parent, prompt start or None, prompt length, response start)."""
    start, prompt_at = 0, {}
    for slot, i in enumerate(members):
        counter, size = samples.prompt[i].counter, len(samples.prompt[i].tokens)
        if not shared:
            parent, prompt_start = slot + 1, start
            start += size
            last = start - 1
        elif counter in prompt_at:
            parent, last, prompt_start = *prompt_at[counter], None
        else:
            parent, prompt_start = first_shared_segment + len(prompt_at), start
            start += size
            last = start - 1
            prompt_at[counter] = (parent, last)
        yield i, slot, parent, prompt_start, last, start
        start += len(samples.response[i])


def to_rows(samples: Samples, placement: Placement, *, prompts_per_step: int) -> Rows:
    """Builds this process's Rows (NumPy) from its samples."""
    s = placement.shape
    token_shape = (s.mini_batches, s.rows, s.tokens)
    sequence_shape = (s.mini_batches, s.rows, s.sequences)
    rows = Rows(
        *(np.zeros(token_shape, np.int32) for _ in range(4)),
        response_mask=np.zeros(token_shape, bool),
        parent=np.zeros(sequence_shape, np.int32),
        group=np.zeros(sequence_shape, np.int32),
        valid=np.zeros(sequence_shape, bool),
        length=np.zeros(sequence_shape, np.int32),
    )
    for k, mini in enumerate(placement.sample_at):
        for r, members in enumerate(mini):
            at = (k, r)
            parts = _row_parts(samples, members, s.sequences + 1, placement.shared)
            for i, slot, parent, prompt_start, last, start in parts:
                prompt, response = samples.prompt[i].tokens, samples.response[i]
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
                rows.response_mask[at][start:end] = samples.response_mask[i]
                rows.parent[at][slot] = parent
                rows.group[at][slot] = samples.prompt[i].counter % prompts_per_step
                rows.valid[at][slot] = True
                rows.length[at][slot] = int(np.sum(samples.response_mask[i]))
    return rows


def token_field(samples: Samples, placement: Placement, values: Sequence[np.ndarray]) -> np.ndarray:
    """Per-token values of the responses (one array per sample): float32 [K, R, L], else 0."""
    s = placement.shape
    out = np.zeros((s.mini_batches, s.rows, s.tokens), np.float32)
    for k, mini in enumerate(placement.sample_at):
        for r, members in enumerate(mini):
            parts = _row_parts(samples, members, s.sequences + 1, placement.shared)
            for i, _, _, _, _, start in parts:
                out[k, r, start : start + len(values[i])] = values[i]
    return out


def sequence_field(placement: Placement, values: Sequence[float]) -> np.ndarray:
    """One number per sample as float32 [K, R, S], 0 elsewhere."""
    s = placement.shape
    out = np.zeros((s.mini_batches, s.rows, s.sequences), np.float32)
    for k, mini in enumerate(placement.sample_at):
        for r, members in enumerate(mini):
            for slot, i in enumerate(members):
                out[k, r, slot] = values[i]
    return out


def from_token_field(samples: Samples, placement: Placement, field: np.ndarray) -> list[np.ndarray]:
    """Inverse of token_field: the responses' values of each sample, in sample order."""
    out: list[np.ndarray] = [np.zeros(0, field.dtype)] * len(samples)
    s = placement.shape
    for k, mini in enumerate(placement.sample_at):
        for r, members in enumerate(mini):
            parts = _row_parts(samples, members, s.sequences + 1, placement.shared)
            for i, _, _, _, _, start in parts:
                out[i] = field[k, r, start : start + len(samples.response[i])]
    return out


def from_sequence_field(placement: Placement, field: np.ndarray, count: int) -> np.ndarray:
    """Inverse of sequence_field: one number per sample, [N]."""
    out = np.zeros(count, field.dtype)
    for k, mini in enumerate(placement.sample_at):
        for r, members in enumerate(mini):
            for slot, i in enumerate(members):
                out[i] = field[k, r, slot]
    return out


def filled_tokens(samples: Samples, placement: Placement) -> np.ndarray:
    """Tokens in each row, int64 [K, R]; a shared prompt counts once per row."""
    s = placement.shape
    out = np.zeros((s.mini_batches, s.rows), np.int64)
    for k, mini in enumerate(placement.sample_at):
        for r, members in enumerate(mini):
            for i, *_, start in _row_parts(samples, members, s.sequences + 1, placement.shared):
                out[k, r] = start + len(samples.response[i])
    return out
