"""Assignment of sequences to rows and of rows to data ranks: one pure function.

Every process calls `assign` with the same lengths and gets the same result; there is no leader. The
number of rows on the busiest rank costs the most time, since all ranks run as many micro-batches as
that one; next come the tokens in the rows. Sequences stay at the site that sampled them unless
moving some makes the busiest rank lighter by more than a threshold.

N sequences, R data ranks, F filled rows, L tokens and S sequences per row at most. A *site*
exchanges nothing within itself: a process with its data ranks, or the processes that share one.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from distflow_jax.coordinator.first_fit import (
    Lengths,
    LengthTable,
    RowLimits,
    first_fit_decreasing,
)


@dataclasses.dataclass(frozen=True)
class RowAssignment:
    """F rows, each a tuple of sequence numbers in rising order, and the data rank of each."""

    rows: tuple[tuple[int, ...], ...]
    rank: tuple[int, ...]

    def rows_of(self, rank: int) -> list[tuple[int, ...]]:
        """The rows of one rank, in order."""
        return [row for row, r in zip(self.rows, self.rank, strict=True) if r == rank]

    def spread(self, ranks: int) -> "RowAssignment":
        """The same rows over another number of ranks, at most ceil(F / ranks) on each.

        Neighbouring rows stay neighbours, so that on one device order few rows move. A pure
        function of (rows, ranks): going to n ranks and back to m gives what m ranks had.
        """
        order = sorted(range(len(self.rows)), key=lambda r: (self.rank[r], r))
        total, rank = len(order), [0] * len(order)
        for place, row in enumerate(order):
            rank[row] = place * ranks // total
        return RowAssignment(self.rows, tuple(rank))


def assign(
    lengths: Lengths,
    limits: RowLimits,
    ranks_of_site: Sequence[Sequence[int]],
    *,
    threshold: float,
    max_rows: int | None = None,
) -> RowAssignment:
    """Rows for all sequences, and a rank for each row.

    Args:
      lengths: of all N sequences of one mini-batch.
      limits: of a row.
      ranks_of_site: the data ranks at each site; every rank 0 .. R-1 is at one site.
      threshold: share by which the busiest rank must get lighter (in rows, or in tokens) before
        any sequence moves to another site.
      max_rows: static room of a rank, in rows; at least ceil(rows_bound / R). None: no limit.

    Returns an assignment in which no rank has more than ceil(F / R) + 1 rows, F being what
    first-fit-decreasing needs for all N together.

    Raises ValueError if a sequence is longer than a row, or a group that must stay together.
    """
    if limits.group_size:
        return _assign_groups(lengths, limits, ranks_of_site, threshold, max_rows)
    ranks = sum(map(len, ranks_of_site))
    local = [
        [
            tuple(int(mine[i]) for i in row)
            for row in first_fit_decreasing(lengths.take(mine), limits)
        ]
        for site in range(len(ranks_of_site))
        for mine in [np.flatnonzero(lengths.site == site)]
    ]
    stay = _Packing(lengths, limits, ranks)
    for site_ranks, rows in zip(ranks_of_site, local, strict=True):
        stay.deal(rows, site_ranks)
        stay.refine(site_ranks, tolerance=threshold)
    # rows stay whole and at their site as far as their number allows; the surplus moves
    flat = [(row, site) for site, rows in enumerate(local) for row in rows]
    room = -(-len(flat) // ranks)
    if room > -(-_least_rows(lengths, limits) // ranks):  # all together may need fewer rows
        together = first_fit_decreasing(lengths, limits)
        if -(-len(together) // ranks) < room:
            room = -(-len(together) // ranks)
            flat = [(row, _site_of(row, lengths)) for row in map(tuple, together)]
    fits = max_rows is None or stay.busiest_rows() <= max_rows
    if fits and stay.busiest_rows() <= room and stay.imbalance() <= threshold:
        return stay.result()
    move = _Packing(lengths, limits, ranks)
    surplus = []
    for site, site_ranks in enumerate(ranks_of_site):
        mine = sorted((r for r, s in flat if s == site), key=lambda r: (-move.tokens(r), r))
        keep = room * len(site_ranks)
        move.deal(mine[:keep], site_ranks)
        surplus += mine[keep:]
    move.deal(surplus, range(ranks), room)
    move.refine(range(ranks), tolerance=threshold)
    return stay.result() if fits and not _pays(stay, move, threshold) else move.result()


def _assign_groups(
    lengths: Lengths,
    limits: RowLimits,
    ranks_of_site: Sequence[Sequence[int]],
    threshold: float,
    max_rows: int | None,
) -> RowAssignment:
    """As `assign`, with each group kept whole."""
    whole_groups, whole, members = _whole_groups(lengths, limits)
    found = assign(whole_groups, whole, ranks_of_site, threshold=threshold, max_rows=max_rows)
    rows = (tuple(sorted(i for group in row for i in members[group])) for row in found.rows)
    return RowAssignment(tuple(rows), found.rank)


def rows_needed(lengths: Lengths, limits: RowLimits) -> int:
    """Rows F that first-fit-decreasing opens for all sequences: `assign` takes ceil(F / R) of a
    rank where it has no more room than that."""
    if limits.group_size:
        lengths, limits, _ = _whole_groups(lengths, limits)
    return len(first_fit_decreasing(lengths, limits))


def _whole_groups(
    lengths: Lengths, limits: RowLimits
) -> tuple[Lengths, RowLimits, list[list[int]]]:
    """(each group as one sequence, limits for these, the sequences of each group)."""
    groups, first, number = np.unique(lengths.group, return_index=True, return_inverse=True)
    response = np.bincount(number, lengths.response, len(groups)).astype(np.int64)
    if limits.shared:
        prompt = lengths.prompt[first]
    else:
        prompt = np.bincount(number, lengths.prompt, len(groups)).astype(np.int64)
    longest = int((prompt + response).max(initial=0))
    if longest > limits.tokens:
        raise ValueError(
            f"a group of {longest} tokens, which must stay in one row, does not fit a row of "
            f"{limits.tokens}; raise training.row_tokens"
        )
    members: list[list[int]] = [[] for _ in groups]
    for i, g in enumerate(number.tolist()):
        members[g].append(i)
    whole_groups = Lengths(prompt, response, np.arange(len(groups)), lengths.site[first])
    whole = RowLimits(limits.tokens, limits.sequences // limits.group_size, shared=False)
    return whole_groups, whole, members


def _pays(stay: "_Packing", move: "_Packing", threshold: float) -> bool:
    """Whether moving makes the busiest rank lighter by more than the threshold."""
    saved = stay.busiest_rows() - move.busiest_rows()
    if saved > 1 or saved > threshold * stay.busiest_rows():
        return True
    if stay.imbalance() <= threshold:
        return False
    gain = stay.imbalance() - move.imbalance()
    return gain > (0 if move.imbalance() <= threshold else threshold)


def _least_rows(lengths: Lengths, limits: RowLimits) -> int:
    """No packing needs fewer rows than this."""
    if limits.shared:
        _, one_each = np.unique(lengths.group, return_index=True)
        prompts = lengths.prompt[one_each].sum()
    else:
        prompts = lengths.prompt.sum()
    tokens = int(prompts + lengths.response.sum())
    return max(-(-tokens // limits.tokens), -(-len(lengths) // limits.sequences))


def _site_of(row: Sequence[int], lengths: Lengths) -> int:
    """The site that has the most tokens of a row."""
    i = np.asarray(row)
    return int(np.bincount(lengths.site[i], (lengths.prompt + lengths.response)[i]).argmax())


class _Row:
    """A row while it is filled. Lengths are lists, which Python indexes faster than arrays."""

    def __init__(self, table: "LengthTable", members: Sequence[int] = ()):
        self._table = table
        self.members = list(members)
        self.of_group: dict[int, int] = {}  # group -> how many of it are here
        for member in members:
            group = table.group[member]
            self.of_group[group] = self.of_group.get(group, 0) + 1
        self.tokens = table.tokens(members)

    def relief(self, member: int) -> int:
        """Tokens that removing a sequence would free."""
        n = self._table
        if n.shared and self.of_group[n.group[member]] > 1:
            return n.response[member]
        return n.response[member] + n.prompt[member]

    def add(self, member: int) -> int:
        """Adds a sequence; returns the tokens added."""
        n = self._table
        group, price = n.group[member], n.response[member]
        here = self.of_group.get(group, 0)
        if not (n.shared and here):
            price += n.prompt[member]
        self.members.append(member)
        self.of_group[group] = here + 1
        self.tokens += price
        return price

    def remove(self, member: int) -> int:
        """Removes a sequence; returns the tokens freed."""
        relief, group = self.relief(member), self._table.group[member]
        self.members.remove(member)
        self.of_group[group] -= 1
        if not self.of_group[group]:
            del self.of_group[group]
        self.tokens -= relief
        return relief


class _Packing:
    """Rows on ranks while they are built."""

    def __init__(self, lengths: Lengths, limits: RowLimits, ranks: int):
        self._lengths, self._limits = lengths, limits
        self._table = LengthTable(lengths, limits.shared)
        self._rows: list[list[_Row]] = [[] for _ in range(ranks)]
        self._load = [0] * ranks  # tokens
        self._full = lengths.prompt + lengths.response  # tokens of each with a prompt of its own
        # candidates of each rank whose rows are as they were
        self._known: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def tokens(self, row: Sequence[int]) -> int:
        """Tokens in a row of these members."""
        return self._table.tokens(row)

    def deal(
        self, rows: Sequence[Sequence[int]], ranks: Sequence[int], room: int | None = None
    ) -> None:
        """Rows -> ranks: fullest first, each to the lightest among those with the fewest rows.

        With `room` the ranks that have fewer rows than that are filled up, lightest first.
        """
        made = [_Row(self._table, members) for members in rows]
        for row in sorted(made, key=lambda r: (-r.tokens, r.members)):
            if room is None:
                rank = min(ranks, key=lambda q: (len(self._rows[q]), self._load[q], q))
            else:
                open_ranks = [q for q in ranks if len(self._rows[q]) < room]
                rank = min(open_ranks, key=lambda q: (self._load[q], q))
            self._rows[rank].append(row)
            self._load[rank] += row.tokens
        self._known.clear()

    def busiest_rows(self) -> int:
        """Rows of the rank that has the most."""
        return max(map(len, self._rows))

    def imbalance(self) -> float:
        """By how much the tokens of the busiest rank exceed the mean, as a share of it."""
        total = sum(self._load)
        return max(self._load) * len(self._load) / total - 1 if total else 0.0

    def refine(self, ranks: Sequence[int], *, tolerance: float) -> None:
        """Moves single sequences from the busiest rank to others while that makes it lighter.

        No rank gets more rows than the busiest of `ranks` has now.
        """
        ranks = list(ranks)
        room = max(len(self._rows[q]) for q in ranks)
        mean = sum(self._load[q] for q in ranks) / len(ranks)
        for _ in range(4 * len(self._lengths)):
            by_load = sorted(ranks, key=lambda q: (self._load[q], q))
            heavy = by_load.pop()
            if self._load[heavy] <= mean * (1 + tolerance):
                return
            if not any(self._exchange(heavy, light, room) for light in by_load[:4]):
                return

    def _exchange(self, heavy: int, light: int, room: int) -> bool:
        """Makes the best move, or else swap, from one rank to another, if there is one."""
        members, rows_at, relief = self._candidates(heavy)
        gap = self._load[heavy] - self._load[light]
        best: tuple[int, int, int] | None = None  # (larger load after it, place in members, row)
        targets = list(self._rows[light])
        if len(targets) < room:
            targets.append(_Row(self._table))
        for r, row in enumerate(targets):
            if len(row.members) >= self._limits.sequences:
                continue
            cost = self._prices(row, members)
            fits = (cost <= self._limits.tokens - row.tokens) & (cost < gap)
            if not fits.any():
                continue
            after = np.where(fits, np.maximum(gap - relief, cost), gap)
            place = int(after.argmin())
            if after[place] < gap and (best is None or after[place] < best[0]):
                best = (int(after[place]), place, r)
        if best is None:
            return self._swap(heavy, light, gap)
        _, place, r = best
        self._forget(heavy, light)
        source, member = self._rows[heavy][int(rows_at[place])], int(members[place])
        self._load[heavy] -= source.remove(member)
        if not source.members:
            self._rows[heavy].remove(source)
        if r == len(self._rows[light]):
            self._rows[light].append(targets[r])
        self._load[light] += targets[r].add(member)
        return True

    def _swap(self, heavy: int, light: int, gap: int) -> bool:
        """Swaps two sequences, if that helps."""
        if not self._rows[light]:
            return False
        (i, row_i, size_i), (j, row_j, size_j) = self._candidates(heavy), self._candidates(light)
        free_i = np.array([self._limits.tokens - row.tokens for row in self._rows[heavy]])
        free_j = np.array([self._limits.tokens - row.tokens for row in self._rows[light]])
        full_i, full_j = self._full[i], self._full[j]
        # counted as if each moved with its prompt: an upper bound
        leaves = size_i[:, None] - full_j[None]  # the heavy rank gets lighter by at least this
        enters = full_i[:, None] - size_j[None]  # the light one heavier by at most this
        fits = (enters <= free_j[row_j][None]) & (-leaves <= free_i[row_i][:, None])
        after = np.where(fits & (leaves > 0), np.maximum(gap - leaves, enters), gap)
        a, b = np.unravel_index(int(after.argmin()), after.shape)
        if after[a, b] >= gap:
            return False
        ours, theirs = self._rows[heavy][int(row_i[a])], self._rows[light][int(row_j[b])]
        mine, other = int(i[a]), int(j[b])
        self._forget(heavy, light)
        self._load[heavy] += -ours.remove(mine) + ours.add(other)
        self._load[light] += -theirs.remove(other) + theirs.add(mine)
        return True

    def _candidates(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(sequence, row, tokens that removing it would free) of a rank, as three int64 arrays."""
        if rank not in self._known:
            rows = self._rows[rank]
            members = [i for row in rows for i in row.members]
            relief = [row.relief(i) for row in rows for i in row.members]
            at = [r for r, row in enumerate(rows) for _ in row.members]
            columns = (np.array(column, np.int64) for column in (members, at, relief))
            self._known[rank] = tuple(columns)
        return self._known[rank]

    def _forget(self, *ranks: int) -> None:
        """Forgets the candidates of ranks whose rows change."""
        for rank in ranks:
            self._known.pop(rank, None)

    def _prices(self, row: _Row, members: np.ndarray) -> np.ndarray:
        """Tokens that each of `members` would add to a row."""
        cost = self._full[members]
        if self._limits.shared and row.members:
            groups = self._lengths.group[members]
            held = (groups[:, None] == np.array(list(row.of_group))).any(1)
            cost = cost - np.where(held, self._lengths.prompt[members], 0)
        return cost

    def result(self) -> RowAssignment:
        """Rows and ranks, in a canonical order."""
        flat = sorted(
            (rank, tuple(sorted(row.members)))
            for rank, rows in enumerate(self._rows)
            for row in rows
        )
        return RowAssignment(tuple(row for _, row in flat), tuple(rank for rank, _ in flat))
