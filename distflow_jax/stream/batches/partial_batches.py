"""The policy of partial batches: which groups of a step pass through its nodes next.

A partial batch is a set of complete groups of the current step. Processes exchange the facts of
their complete groups, and each makes the same plan from them (agreement.py). With K mini-batches,
the first B / K groups of a step form the first mini-batch, and so on, as in Shares.make for an
undivided step. A partial batch has groups of one mini-batch; complete groups of later ones wait. A
group without any remaining response is in a partial batch, but takes no place in a mini-batch. An
undivided step is a step whose first partial batch has all of its groups.

Nothing here communicates, and nothing depends on the order in which facts arrive.
"""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.coordinator.packing import rows_needed
from distflow_jax.stream.batches.group_facts import FactsOf, GroupFacts, facts_of, lengths_of
from distflow_jax.stream.schedule import Admission, Cut


@dataclasses.dataclass(frozen=True)
class PartialBatch:
    """Groups of a step that pass through its nodes together, in counter order.

    A partial batch without groups ends a mini-batch whose groups have all been trained, or that has
    none.
    """

    step: int
    number: int  # within the step, from 1
    mini_batch: int  # from 0
    groups: tuple[GroupFacts, ...]
    ends_mini_batch: bool
    last: bool  # of the step

    @property
    def counters(self) -> tuple[int, ...]:
        return tuple(group.counter for group in self.groups)


@dataclasses.dataclass(frozen=True)
class PartialBatchRoom:
    """The static rows of a partial batch over all data ranks: at most L tokens and S sequences
    each.

    Computes how many of the waiting groups fit.
    """

    rows: int
    limits: RowLimits

    def fill(self, groups: Sequence[GroupFacts]) -> tuple[int, bool]:
        """(how many of the groups, the first ones, go into the rows; whether these are full then).

        They are full if the next group does not fit, or one as large as the mean of these. Raises
        ValueError if the first group alone does not fit.
        """
        most, tokens, sequences = 0, 0, 0
        for group in groups:
            tokens += self._tokens(group)
            sequences += len(group.responses)
            if not self._holds(tokens, sequences):
                break
            most += 1
        while most and not self._fits(groups[:most]):
            most -= 1
        if groups and not most:
            raise ValueError(
                f"the group of prompt {groups[0].counter}, {self._tokens(groups[0])} tokens, does "
                f"not fit the {self.rows} rows of a partial batch: raise stream.partial_batch_rows"
            )
        if most < len(groups):
            return most, True
        full = most and not self._holds(tokens + tokens // most, sequences + sequences // most)
        return most, bool(full)

    def free(self, groups: Sequence[GroupFacts]) -> tuple[int, int]:
        """Tokens and sequences that can still be added to these groups, at most; never below 1."""
        tokens, sequences = self.size(groups)
        limits = self.limits
        free = self.rows * limits.tokens - tokens, self.rows * limits.sequences - sequences
        return max(1, free[0]), max(1, free[1])

    def size(self, groups: Sequence[GroupFacts]) -> tuple[int, int]:
        """Tokens and sequences of groups."""
        return sum(map(self._tokens, groups)), sum(len(group.responses) for group in groups)

    def _tokens(self, group: GroupFacts) -> int:
        return group.tokens(shared=self.limits.shared)

    def _holds(self, tokens: int, sequences: int) -> bool:
        limits = self.limits
        return tokens <= self.rows * limits.tokens and sequences <= self.rows * limits.sequences

    def _fits(self, groups: Sequence[GroupFacts]) -> bool:
        # numbered as in the rows: first-fit-decreasing breaks ties by these numbers
        ordered = sorted(groups, key=lambda group: group.counter)
        lengths = lengths_of(ordered, 1, 1 + max(group.buffer for group in ordered))
        return rows_needed(lengths, self.limits) <= self.rows


@dataclasses.dataclass(frozen=True)
class _Open:
    """The current mini-batch: its complete groups, and whether others are still being sampled."""

    complete: list[GroupFacts]
    in_order: int  # so many of them, the first ones, come before all that are under way
    under_way: bool


class PartialBatchPlanner(abc.ABC):
    """The partial batches of a run; subclasses choose their groups.

    All processes with the same facts make the same plan.

    Args:
      admission: the rule and its filter decisions, which nothing else changes.
      mini_batches: K.

    Attributes:
      spreads: whether a process that has enough calls the others; otherwise each waits for groups
        of its own.
    """

    spreads = False

    def __init__(
        self, admission: Admission, *, mini_batches: int = 1, facts_of: FactsOf = facts_of
    ):
        self._admission, self.facts_of = admission, facts_of
        self._minis, self._size = mini_batches, admission.rule.groups // mini_batches
        self._facts: dict[int, GroupFacts] = {}  # of groups that no finished step has
        self._taken: set[int] = set()  # counters of this step's partial batches
        self._number, self._mini = 0, 0

    @property
    def step(self) -> int:
        return self._admission.finished + 1

    @property
    def mini_batch(self) -> int:
        return self._mini

    @property
    def cut(self) -> Cut:
        return self._admission.cut(self.step)

    @property
    def end(self) -> int:
        """The first counter after those that the next partial batch may have."""
        return self.cut.end

    def begin(self, step: int) -> bool:
        """Begins a step, which must be the next one; whether there is a group for it."""
        if self.step != step:
            raise ValueError(
                f"partial batches of step {self.step} come before those of step {step}"
            )
        return self._admission.has_step(step)

    def due(self, whole: bool, news: Sequence[GroupFacts], processes: int) -> bool:
        """Whether it is time for one of so many processes to gather.

        `whole`: it has all of its groups below `end`; `news`: facts of such groups, which the
        others do not know.
        """
        return whole

    def learn(self, facts: Iterable[GroupFacts]) -> None:
        """Notes facts, in any order; those of a group that is known must be the same."""
        for group in facts:
            if group.counter < self._admission.position:
                continue
            if self._facts.setdefault(group.counter, group) != group:
                raise ValueError(f"the group of prompt {group.counter} became complete twice")
            self._admission.judge(group.counter, group.keep)

    def next(self) -> PartialBatch | None:
        """The next partial batch, which counts as taken then; None: more facts have to come
        first."""
        if self._mini == self._minis:
            raise ValueError(f"step {self.step} has no more partial batches")
        found = self._open()
        groups = self._chosen(found)
        if groups is None:
            return None
        self._number += 1
        self._taken |= {group.counter for group in groups}
        ends = not found.under_way and len(groups) == len(found.complete)
        mini, last = self._mini, ends and self._mini == self._minis - 1
        if ends:
            self._mini += 1
        chosen = sorted(groups, key=lambda group: group.counter)
        return PartialBatch(self.step, self._number, mini, tuple(chosen), ends, last)

    def finish(self) -> Cut:
        """Ends a step whose last partial batch was taken; its facts are forgotten."""
        if self._mini < self._minis:
            raise ValueError(f"step {self.step} has more partial batches")
        cut = self._admission.finish(self.step)
        self._facts = {c: group for c, group in self._facts.items() if c >= cut.end}
        self._taken, self._number, self._mini = set(), 0, 0
        return cut

    def _open(self) -> _Open:
        """The present mini-batch. A group whose mini-batch depends on facts to come is in none.

        A group of the cut is the `most`-th one with responses if all groups before it that are
        under way have some and are kept, the `least`-th one if none of them is.
        """
        complete: list[GroupFacts] = []
        in_order, least, most, under_way = 0, 0, 0, False
        for counter in self.cut.kept:
            group = self._facts.get(counter)
            if group is None:
                under_way |= least // self._size <= self._mini
                most += 1
                continue
            mine = least // self._size == most // self._size == self._mini
            if mine and counter not in self._taken:
                complete.append(group)
                in_order += not under_way
            if group.responses:
                least, most = least + 1, most + 1
        return _Open(complete, in_order, under_way)

    @abc.abstractmethod
    def _chosen(self, found: _Open) -> Sequence[GroupFacts] | None:
        """The groups of the next partial batch; None: it is not decided yet."""


class CounterPlanner(PartialBatchPlanner):
    """Partial batches of `prompts` groups by their counters: reproducible."""

    def __init__(self, admission: Admission, prompts: int, **options: Any):
        super().__init__(admission, **options)
        self._prompts = prompts

    @property
    def end(self) -> int:
        """The first counter after those that the next partial batch waits for, if all of them are
        kept."""
        mine, most = [], 0
        for counter in self.cut.kept:
            if most // self._size == self._mini and counter not in self._taken:
                mine.append(counter)
            group = self._facts.get(counter)
            most += group is None or bool(group.responses)
        return mine[: self._prompts][-1] + 1

    def _chosen(self, found: _Open) -> Sequence[GroupFacts] | None:
        if found.in_order >= self._prompts or not found.under_way:
            return found.complete[: self._prompts]
        return None


class ReadyPlanner(PartialBatchPlanner):
    """Partial batches that fill a `room` with the oldest complete groups."""

    spreads = True

    def __init__(self, admission: Admission, room: PartialBatchRoom, **options: Any):
        super().__init__(admission, **options)
        self._room = room

    def due(self, whole: bool, news: Sequence[GroupFacts], processes: int) -> bool:
        """Whether the room could be filled, if all processes have as many new groups, or no group
        of this process is to come."""
        if whole or not news:
            return bool(news)
        missing = self._room.free(self._open().complete)
        sizes = zip(self._room.size(news), missing, strict=True)
        return any(size * processes >= most for size, most in sizes)

    def _chosen(self, found: _Open) -> Sequence[GroupFacts] | None:
        oldest = sorted(found.complete, key=lambda group: (group.first, group.counter))
        count, full = self._room.fill(oldest)
        return oldest[:count] if full or not found.under_way else None
