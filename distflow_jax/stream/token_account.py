"""Tokens of a run whose samplers run ahead: none is forgotten, and none is counted twice."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from distflow_jax.layout import Metrics, Parts

ACCOUNT = "account"  # in the place of a node's id
PREFIX = "perf/tokens/"


@dataclasses.dataclass
class TokenAccount:
    """Tokens of one process: sampled = trained + filtered + lost + under way, summed over all.

    They count from the start of the run, over all restarts. What a killed process had sampled after
    its last record was written is unknown to anyone, and in none of them.
    """

    sampled: int = 0
    trained: int = 0  # of groups that a step took and trains on
    # of groups that a step took and leaves out, by the filter decision of a region
    filtered: int = 0
    lost: int = 0  # at restarts: sampled after the checkpoint, or not saved in it
    under_way: int = 0  # of responses that have begun, and of groups that wait for their step

    @classmethod
    def restored(cls, saved: Iterable[Mapping[str, int]], known: int) -> "TokenAccount":
        """The token account of a run that goes on, for one of its processes; the others begin with
        0.

        `saved`: of all processes, in the checkpoint; `known`: tokens that all of them had sampled
        together by their last records.
        """
        total = cls.total(saved)
        sampled = max(total.sampled, known)
        kept = total.trained + total.filtered + total.lost + total.under_way
        # what is under way is counted again by who goes on with it
        return dataclasses.replace(
            total, sampled=sampled, lost=total.lost + sampled - kept, under_way=0
        )

    @classmethod
    def total(cls, accounts: Iterable[Mapping[str, int]]) -> "TokenAccount":
        """The token accounts of several processes together."""
        found = collections.Counter()
        for account in accounts:
            found.update(account)
        return cls(**{field.name: int(found[field.name]) for field in dataclasses.fields(cls)})

    def saved(self, under_way: int) -> "TokenAccount":
        """The token account for a checkpoint that has so many tokens that are under way.

        They may have been sampled after the checkpoint began.
        """
        kept = self.trained + self.filtered + self.lost + under_way
        return dataclasses.replace(self, sampled=max(self.sampled, kept), under_way=under_way)

    def to_dict(self) -> dict[str, int]:
        """JSON values."""
        return dataclasses.asdict(self)

    def metrics(self) -> Metrics:
        """`perf/tokens/*`, to be merged with those of other processes."""
        return {ACCOUNT: Parts((self.to_dict(),), _merged)}


def _merged(accounts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    names = [field.name for field in dataclasses.fields(TokenAccount)]
    return {PREFIX + name: float(sum(account[name] for account in accounts)) for name in names}
