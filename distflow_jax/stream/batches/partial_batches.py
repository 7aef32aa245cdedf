"""The planner of partial batches: which groups of a step go through its nodes next, without a
controller.

A partial batch is a set of complete groups of the present step. All processes tell each other the
facts of their complete groups, and each plans alike from what all of them know. With K mini-batches
the first B / K groups of a step are the first mini-batch, and so on, as Shares.make has them at
once; a partial batch has groups of one mini-batch, and complete groups of later ones wait. A group
all of whose responses were dropped is in a partial batch, and takes no place in a mini-batch.

Nothing here communicates, and nothing depends on the order in which facts come.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from distflow_jax.stream.batches.group_facts import GroupFacts
from distflow_jax.stream.batches.partial_batch_room import PartialBatchRoom
from distflow_jax.stream.schedule import Admission, Cut


@dataclasses.dataclass(frozen=True)
class PartialBatch:
    """Groups of a step that go through its nodes together, in the order of their counters.

    A partial batch without groups ends a mini-batch of which all are through, or which has none.
    """

    step: int
    number: int  # within the step, from 1
    mini_batch: int  # from 0
    groups: tuple[GroupFacts, ...]
    ends_mini_batch: bool
    last: bool  # of the step

    @property
    def counters(self) -> tuple[int, ...]:
        """The counters of its groups, rising."""
        return tuple(group.counter for group in self.groups)


@dataclasses.dataclass(frozen=True)
class _Open:
    """The present mini-batch: groups that are complete, and whether others are under way."""

    complete: list[GroupFacts]
    in_order: int  # so many of them, the first ones, come before all that are under way
    under_way: bool


class PartialBatchPlanner:
    """The partial batches of a run, step after step. All processes that learn the same facts agree.

    Exactly one of `prompts` and `room` is given.

    Args:
      admission: the rule and its filter decisions, which nothing else changes.
      mini_batches: K.
      prompts: groups of a partial batch, by their counters: reproducible.
      room: of a partial batch that is filled with the oldest complete groups.
    """

    def __init__(
        self,
        admission: Admission,
        *,
        mini_batches: int = 1,
        prompts: int | None = None,
        room: PartialBatchRoom | None = None,
    ):
        if (prompts is None) == (room is None):
            raise ValueError("a partial batch has either a number of groups or a room")
        self._admission, self._room = admission, room
        self._prompts = prompts
        self._minis, self._size = mini_batches, admission.rule.groups // mini_batches
        self._facts: dict[int, GroupFacts] = {}  # of groups that no finished step has
        self._taken: set[int] = set()  # counters of this step's partial batches
        self._number, self._mini = 0, 0

    @property
    def step(self) -> int:
        """The step whose partial batches are planned."""
        return self._admission.finished + 1

    @property
    def mini_batch(self) -> int:
        """The mini-batch of the next partial batch, from 0."""
        return self._mini

    @property
    def cut(self) -> Cut:
        """The counters of the step, as far as filter decisions say."""
        return self._admission.cut(self.step)

    def knows(self, counter: int) -> bool:
        """Whether the facts of a group are known."""
        return counter in self._facts or counter < self._admission.position

    def learn(self, facts: Iterable[GroupFacts]) -> None:
        """Notes facts, in any order; those of a group that is known must be the same."""
        for group in sorted(facts, key=lambda group: group.counter):
            if group.counter < self._admission.position:
                continue
            if self._facts.setdefault(group.counter, group) != group:
                raise ValueError(f"the group of prompt {group.counter} became complete twice")
            self._admission.judge(group.counter, group.keep)

    def next(self) -> PartialBatch | None:
        """The next partial batch, which counts as taken then; None: more facts have to come
        first."""
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

    def wanted(self) -> int | None:
        """The first counter after those that the next partial batch waits for, if all of them are
        kept.

        None: partial batches have a room, and take what is complete.
        """
        if self._prompts is None:
            return None
        mine, most = [], 0
        for counter in self.cut.kept:
            if most // self._size == self._mini:
                mine.append(counter)
            group = self._facts.get(counter)
            most += group is None or bool(group.responses)
        return [c for c in mine if c not in self._taken][: self._prompts][-1] + 1

    def missing(self) -> tuple[int, int]:
        """Tokens and sequences that would fill the room for sure, each at least 1."""
        return self._room.free(self._open().complete)

    def size(self, groups: Sequence[GroupFacts]) -> tuple[int, int]:
        """Tokens and sequences that groups take of a room."""
        return self._room.size(groups)

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

    def _chosen(self, found: _Open) -> Sequence[GroupFacts] | None:
        """The groups of the next partial batch; None: it is not decided yet."""
        if self._mini == self._minis:
            raise ValueError(f"step {self.step} has no more partial batches")
        if self._room is None:
            if found.in_order >= self._prompts or not found.under_way:
                return found.complete[: self._prompts]
            return None
        oldest = sorted(found.complete, key=lambda group: (group.first, group.counter))
        count, full = self._room.fill(oldest)
        return oldest[:count] if full or not found.under_way else None
