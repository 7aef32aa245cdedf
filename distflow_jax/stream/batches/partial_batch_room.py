"""The room of a partial batch: how many of the groups that wait go into its rows.

L tokens and S sequences per row at most.
"""

import dataclasses
from collections.abc import Sequence

from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.coordinator.packing import rows_needed
from distflow_jax.stream.batches.group_facts import GroupFacts, lengths_of


@dataclasses.dataclass(frozen=True)
class PartialBatchRoom:
    """The static rows of a partial batch over all data ranks, and the limits of a row."""

    rows: int
    limits: RowLimits

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.limits.tokens

    @property
    def sequences(self) -> int:
        """Sequences of all rows."""
        return self.rows * self.limits.sequences

    def fill(self, groups: Sequence[GroupFacts]) -> tuple[int, bool]:
        """(how many of the groups, the first ones, go into the rows; whether these are full then).

        They are full if the next group does not fit, or one as large as the mean of these. Raises
        ValueError if the first group alone does not fit.
        """
        most, tokens, sequences = 0, 0, 0
        for group in groups:
            tokens += self._tokens(group)
            sequences += len(group.responses)
            if tokens > self.tokens or sequences > self.sequences:
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
        tokens = sum(map(self._tokens, groups))
        sequences = sum(len(group.responses) for group in groups)
        full = most and (
            tokens + tokens // most > self.tokens or sequences + sequences // most > self.sequences
        )
        return most, bool(full)

    def free(self, groups: Sequence[GroupFacts]) -> tuple[int, int]:
        """Tokens and sequences that can still be added to these groups, at most; never below 1."""
        tokens = self.tokens - sum(map(self._tokens, groups))
        sequences = self.sequences - sum(len(group.responses) for group in groups)
        return max(1, tokens), max(1, sequences)

    def size(self, groups: Sequence[GroupFacts]) -> tuple[int, int]:
        """Tokens and sequences of groups."""
        return sum(map(self._tokens, groups)), sum(len(group.responses) for group in groups)

    def _tokens(self, group: GroupFacts) -> int:
        return group.tokens(shared=self.limits.shared)

    def _fits(self, groups: Sequence[GroupFacts]) -> bool:
        # numbered as in the rows: first-fit-decreasing breaks ties by these numbers
        ordered = sorted(groups, key=lambda group: group.counter)
        lengths = lengths_of(ordered, 1, 1 + max(group.buffer for group in ordered))
        return rows_needed(lengths, self.limits) <= self.rows
