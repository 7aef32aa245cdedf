"""Places of a step's sequences: the process that sampled each, and the rows of each layout.

Every process builds the same `Shares` from a few all-gathered integers, and takes its own rows
from that. N sequences over all processes, group by group; K mini-batches.
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from distflow_jax.batch import Placement, RowShape
from distflow_jax.coordinator.first_fit import Lengths, RowLimits
from distflow_jax.coordinator.packing import RowAssignment, assign
from distflow_jax.images.patch_chunks import PatchSizes
from distflow_jax.layout import Layout
from distflow_jax.models.model_flops import causal_pairs
from distflow_jax.parallel import rules
from distflow_jax.parallel.mesh import processes_of_rank, ranks_of_process


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """Static facts of how sequences become rows."""

    limits: RowLimits
    mini_batches: int  # K
    prompts_per_step: int
    rows: Mapping[Layout, int]  # static rows per data rank and mini-batch, for each mesh layout
    primary: Layout  # rows are balanced over the data ranks of this layout, the trainer's
    threshold: float = 0.03  # share by which the busiest rank must get lighter for rows to move
    images: PatchSizes | None = None  # of the patches beside a row; None: the model has no tower


@dataclasses.dataclass(frozen=True)
class StepLengths:
    """Lengths of N sequences over all processes, int64 [N] each.

    Counters rise, and responses of a group stand in their order.
    """

    counter: np.ndarray  # of the prompt
    home: np.ndarray  # the process that sampled the sequence
    prompt: np.ndarray  # tokens
    response: np.ndarray  # tokens


def data_ranks(layout: Layout) -> int:
    """Data ranks of a mesh layout: groups of devices that hold different rows."""
    return rules.data_ranks(dict(layout.axes))


@dataclasses.dataclass(frozen=True)
class Shares:
    """Assignment of N sequences to processes and rows.

    Arrays are int64 [N], ordered by (group, member).
    """

    plan: PackingPlan
    processes: int
    home: np.ndarray  # the process that sampled the sequence
    group: np.ndarray  # number of the prompt within the step
    member: np.ndarray  # place of the response among those to its prompt, from 0
    prompt: np.ndarray  # tokens
    response: np.ndarray  # tokens
    minis: tuple[RowAssignment, ...]  # of the primary layout, rows of sequence numbers

    @classmethod
    def make(cls, plan: PackingPlan, step: StepLengths, *, processes: int) -> "Shares":
        """Assigns sequences to rows and ranks. Pure: equal arguments, equal result.

        The first B / K groups are the first mini-batch, and so on, B being those of a full step.
        """
        counter, home, prompt, response = step.counter, step.home, step.prompt, step.response
        ranks = data_ranks(plan.primary)
        _, first, group = np.unique(counter, return_index=True, return_inverse=True)
        member = np.arange(len(counter)) - first[group]  # those of a prompt follow each other
        # by the groups of a full step: partial batches fill a mini-batch before they know how many
        # come
        mini = group * plan.mini_batches // plan.prompts_per_step
        # processes that share a data rank are one site
        sites = min(ranks, processes)
        ranks_of_site = [list(ranks_of_process(ranks, sites, s)) for s in range(sites)]
        lengths = Lengths(prompt, response, group, home * sites // processes)
        minis = []
        for k in range(plan.mini_batches):
            chosen = np.flatnonzero(mini == k)
            found = assign(
                lengths.take(chosen),
                plan.limits,
                ranks_of_site,
                threshold=plan.threshold,
                max_rows=plan.rows[plan.primary],
            )
            rows = tuple(tuple(int(chosen[i]) for i in row) for row in found.rows)
            minis.append(RowAssignment(rows, found.rank))
        return cls(plan, processes, home, group, member, prompt, response, tuple(minis))

    def assignments(self, layout: Layout) -> tuple[RowAssignment, ...]:
        """The K assignments for a mesh layout: the same rows, distributed over its ranks."""
        if layout == self.plan.primary:
            return self.minis
        return tuple(mini.spread(data_ranks(layout)) for mini in self.minis)

    @functools.cached_property
    def _needed(self) -> dict[Layout, list[np.ndarray]]:
        return {}

    def needed(self, layout: Layout) -> list[np.ndarray]:
        """For each process the sequences in the rows of its data ranks, in rising order."""
        if layout not in self._needed:
            ranks = data_ranks(layout)
            at_rank: list[list[int]] = [[] for _ in range(ranks)]
            for mini in self.assignments(layout):
                for row, rank in zip(mini.rows, mini.rank, strict=True):
                    at_rank[rank].extend(row)
            self._needed[layout] = [
                np.sort(
                    np.concatenate(
                        [
                            np.array(at_rank[r], np.int64)
                            for r in ranks_of_process(ranks, self.processes, p)
                        ]
                    )
                )
                for p in range(self.processes)
            ]
        return self._needed[layout]

    def counts_rows(self, process: int) -> bool:
        """Whether a process is the first of those that hold its rows of the primary layout."""
        ranks = data_ranks(self.plan.primary)
        (first, *_) = ranks_of_process(ranks, self.processes, process)
        return processes_of_rank(ranks, self.processes, first)[0] == process

    def anything_moves(self, layout: Layout) -> bool:
        """Whether some process needs a sequence that another one sampled."""
        return any((self.home[n] != p).any() for p, n in enumerate(self.needed(layout)))

    def placement(self, layout: Layout, process: int) -> Placement:
        """A process's rows; sequences are numbered by their place in `needed`."""
        if (layout, process) not in self._placements:
            self._placements[layout, process] = self._place(layout, process)
        return self._placements[layout, process]

    @functools.cached_property
    def _placements(self) -> dict[tuple[Layout, int], Placement]:
        return {}

    def _place(self, layout: Layout, process: int) -> Placement:
        number = {int(n): i for i, n in enumerate(self.needed(layout)[process])}
        ranks, room = data_ranks(layout), self.plan.rows[layout]
        mine = ranks_of_process(ranks, self.processes, process)
        minis = []
        for mini in self.assignments(layout):
            placed: list[tuple[int, ...]] = []
            for rank in mine:
                rows = [tuple(number[n] for n in row) for row in mini.rows_of(rank)]
                assert len(rows) <= room, (len(rows), room)
                placed += rows + [()] * (room - len(rows))
            minis.append(tuple(placed))
        limits = self.plan.limits
        shape = RowShape(self.plan.mini_batches, room * len(mine), limits.tokens, limits.sequences)
        return Placement(shape, tuple(minis), limits.shared)

    def sender(self, layout: Layout) -> np.ndarray:
        """The one process that sends each sequence of a layout to others, int64 [N]."""
        ranks = data_ranks(layout)
        sender = np.full(len(self.home), -1, np.int64)
        for mini in self.assignments(layout):
            for row, rank in zip(mini.rows, mini.rank, strict=True):
                sender[list(row)] = processes_of_rank(ranks, self.processes, rank)[0]
        return sender

    def tokens_per_rank(self, layout: Layout) -> np.ndarray:
        """Tokens in the rows of each data rank, int64 [ranks]; a shared prompt counts once a
        row."""
        tokens = np.zeros(data_ranks(layout), np.int64)
        for mini in self.assignments(layout):
            for row, rank in zip(mini.rows, mini.rank, strict=True):
                tokens[rank] += self.response[list(row)].sum()
                tokens[rank] += self.prompt[self._with_own_prompt(row)].sum()
        return tokens

    def pairs(self, window: int = 0) -> int:
        """Pairs (token, token that it attends to) in all rows; see models/model_flops.py."""

        def of_lengths(lengths):
            return sum(causal_pairs(int(length), window) for length in lengths)

        total = 0
        for row in (row for mini in self.minis for row in mini.rows):
            members = list(row)
            prompt = self.prompt[members]
            total += of_lengths(prompt + self.response[members]) - of_lengths(prompt)
            total += of_lengths(self.prompt[self._with_own_prompt(row)])
        return total

    def _with_own_prompt(self, row: tuple[int, ...]) -> np.ndarray:
        """Sequences of a row that store a prompt, int64 [n]: the first of each shared prompt."""
        members = np.array(row, np.int64)
        if not self.plan.limits.shared:
            return members
        return members[np.unique(self.group[members], return_index=True)[1]]
