"""First-fit-decreasing packing of sequences into rows.

N sequences, L tokens and S sequences per row at most.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

BLOCK = 64  # rows that first-fit looks at together


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of N sequences, known to every process: int64 [N] each, ordered by group."""

    prompt: np.ndarray  # tokens
    response: np.ndarray  # tokens
    group: np.ndarray  # number of the prompt within the step; equal numbers, equal prompts
    site: np.ndarray  # number of the site that sampled the sequence

    def __len__(self) -> int:
        return len(self.prompt)

    def take(self, chosen: np.ndarray) -> "Lengths":
        """The lengths of the sequences `chosen`, int64 [n]."""
        columns = (getattr(self, f.name)[chosen] for f in dataclasses.fields(self))
        return Lengths(*columns)


@dataclasses.dataclass(frozen=True)
class RowLimits:
    """Limits of a row, and whether all responses of a prompt in a row share one copy of it.

    With `group_size` the sequences of a prompt, at most so many, stay in one row: a loss that
    compares sequences, those of a preference pair for instance, needs them together.
    """

    tokens: int  # L
    sequences: int  # S
    shared: bool
    group_size: int = 0  # 0: each sequence goes where it fits


class LengthTable:
    """Lengths as lists."""

    def __init__(self, lengths: Lengths, shared: bool):
        self.shared = shared
        self.prompt: list[int] = lengths.prompt.tolist()
        self.response: list[int] = lengths.response.tolist()
        self.group: list[int] = lengths.group.tolist()

    def tokens(self, row: Sequence[int]) -> int:
        """Tokens in a row of these sequences."""
        if self.shared:
            prompts = {self.group[i]: self.prompt[i] for i in row}.values()
        else:
            prompts = [self.prompt[i] for i in row]
        return sum(prompts) + sum([self.response[i] for i in row])


def first_fit_decreasing(lengths: Lengths, limits: RowLimits) -> list[list[int]]:
    """Packs sequences into as few rows as first-fit finds, largest groups first.

    With `limits.shared` a sequence whose prompt already lies in a row costs only its response
    there; such rows are tried first, and a whole group goes into one row where it fits. A row is
    opened only when no other has room, so every row but the last holds at least
    min(S, L // longest sequence) sequences: the bound behind `rows_bound`.

    Raises ValueError if a sequence is longer than a row.
    """
    longest = int((lengths.prompt + lengths.response).max(initial=0))
    if longest > limits.tokens:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit a row of {limits.tokens}; raise "
            "training.row_tokens"
        )
    table = LengthTable(lengths, limits.shared)
    order: dict[int, list[int]] = {}
    for i in np.argsort(-lengths.response, kind="stable").tolist():
        order.setdefault(table.group[i] if limits.shared else i, []).append(i)
    cost = {g: table.prompt[m[0]] + sum(table.response[i] for i in m) for g, m in order.items()}
    rows: list[list[int]] = []
    free: list[int] = []
    most_free: list[int] = []  # in each block of rows: full blocks are skipped

    def first(tokens: int, sequences: int) -> int | None:
        for block, room in enumerate(most_free):
            if room >= tokens:
                start = block * BLOCK
                for row in range(start, min(start + BLOCK, len(rows))):
                    if free[row] >= tokens and len(rows[row]) + sequences <= limits.sequences:
                        return row
        return None

    def place(row: int, members: list[int], tokens: int) -> None:
        rows[row].extend(members)
        block, before = row // BLOCK, free[row]
        free[row] = before - tokens
        if before >= most_free[block]:  # else another row has the most
            most_free[block] = max(free[block * BLOCK : (block + 1) * BLOCK])

    for key in sorted(order, key=lambda g: (-cost[g], g)):
        members = order[key]
        row = first(cost[key], len(members))
        if row is not None:
            place(row, members, cost[key])
            continue
        holding: list[int] = []  # rows that have this prompt
        for i in members:
            alone = table.response[i]
            for row in holding:
                if free[row] >= alone and len(rows[row]) < limits.sequences:
                    break
            else:
                row = None
            if row is not None:
                place(row, [i], alone)
                continue
            full = table.prompt[i] + alone
            row = first(full, 1)
            if row is None:
                row = len(rows)
                rows.append([])
                free.append(limits.tokens)
                if len(rows) > BLOCK * len(most_free):
                    most_free.append(0)
            place(row, [i], full)
            holding.append(row)
            holding.sort()
    return rows


def rows_bound(num_sequences: int, longest: int, limits: RowLimits) -> int:
    """Upper bound on the rows that first_fit_decreasing opens for lengths up to `longest`."""
    per_row = max(1, min(limits.sequences, limits.tokens // longest))
    return -(-num_sequences // per_row)
