"""Rounds of a region: more prompts, until enough groups are worth training on.

Every process does the same number of rounds, since all decide from all-gathered verdicts. Of the
groups kept over all rounds the first B by prompt index make up the step.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.cluster import processes
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.field_store import FieldStore, take

# columns of this process's responses by field -> bool for each: whether its group is worth keeping
Until = Callable[[Mapping[str, Sequence[Any]]], Sequence[bool]]
NextRound = Callable[[], bool]  # starts a round; False: no more are needed
Given = Mapping[str, Sequence[Any]]  # the loader's columns, see FieldStore.of_step

log = logging.getLogger("distflow_jax")


def informative(columns: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Whether the scores of a response's group differ: others have no advantage to learn from.

    Scores before shaping, `unshaped_score`, where they are written: a length penalty would make
    every group informative. Yu et al. 2025 (DAPO, arxiv.org/abs/2503.14476), sec. 3.2.
    """
    score = np.asarray(columns.get("unshaped_score", columns["score"]), np.float64)
    _, group = np.unique(columns["uid"][:, 0], return_inverse=True)
    high = np.full(group.max(initial=-1) + 1, -np.inf)
    low = -high
    scored = ~np.isnan(score)
    np.maximum.at(high, group[scored], score[scored])
    np.minimum.at(low, group[scored], score[scored])
    return (high > low)[group]


UNTIL: dict[str, Until] = {"informative": informative}

DATA_ENDED, PREEMPTED, NO_WORKERS = "the data ended", "stopped by a signal", "no worker was there"
_GO_ON = {DATA_ENDED: "raise data.epochs for more", PREEMPTED: "start again to go on"}


class Ended(Exception):
    """A run makes no further step, for a reason that its record names."""

    def __init__(self, reason: str, *, more: str = "", fix: str = ""):
        """`reason`: DATA_ENDED, PREEMPTED or NO_WORKERS; `more`: of it, and `fix`, for the log."""
        fix = fix or _GO_ON.get(reason, "")
        super().__init__(f"{reason}{more}; {fix}")
        self.reason, self._what, self._fix = reason, f"{reason}{more}", fix

    def told(self, step: int, steps: int) -> str:
        """A line on the end of a run of `steps` after so many."""
        return f"{self._what} after step {step} of {steps}; {self._fix}"


def no_round() -> bool:  # nodes of a region ran before the step
    return False


class Rounds:
    """A coordinator's step in rounds. `next` starts one; False: no more rounds are needed."""

    def __init__(
        self,
        coordinator: Coordinator,
        draw: Callable[[], Given | None],
        until: Until,
        *,
        groups: int,
        max_rounds: int,
    ):
        """`draw` returns columns of the next prompts, None at the end of the data; `groups`: number
        of groups in a step."""
        self._coordinator, self._draw, self._until = coordinator, draw, until
        self._groups, self._max_rounds = groups, max_rounds
        self._rounds: list[FieldStore] = []
        self._kept: list[int] = []  # counters of the groups that are kept, over all processes
        self._sampled = 0  # groups over all processes
        self._open = False

    def next(self) -> bool:
        """Ends the running round and starts another one where that is needed. Collective.

        Raises Ended where there are no prompts for a first round.
        """
        if self._open:
            self._end_round()
        if len(self._kept) < self._groups and len(self._rounds) < self._max_rounds:
            given = self._draw()
            if given is not None:
                self._coordinator.begin(given)
                self._open = True
                return True
        if not self._rounds:
            raise Ended(DATA_ENDED)
        self._end()
        return False

    def _end_round(self) -> None:
        step, self._open = self._coordinator.store.copy(), False
        keep = np.asarray(self._until(step.columns), bool)
        counters = step.uid[step.own, 0]
        if keep.shape != counters.shape:
            raise ValueError(
                f"the region's `until` gave {keep.shape} verdicts for {len(counters)} responses: "
                "one bool for each is needed"
            )
        groups = np.unique(counters)
        stays = [bool(keep[counters == group].all()) for group in groups]
        verdicts = np.array([groups, stays], np.int64).T.reshape(-1, 2)
        table = np.concatenate(processes.all_gather_ragged(verdicts))
        self._kept += table[table[:, 1] == 1, 0].tolist()
        self._sampled += len(table)
        self._rounds.append(step)

    def _end(self) -> None:
        winners = np.array(sorted(self._kept)[: self._groups], np.int64)
        if len(winners) < self._groups:
            log.warning(
                "only %d of %d groups are worth training on after %d rounds of %d: %s. Raise the "
                "region's max_rounds, or give problems of other difficulty",
                len(winners),
                self._groups,
                len(self._rounds),
                self._sampled // len(self._rounds),
                "going on with these" if len(winners) else "this step changes no weights",
            )
        self._coordinator.use(joined(self._rounds, winners))

    def metrics(self) -> dict[str, float]:
        """Rounds of the step, and groups that were sampled, kept and missing."""
        return {
            "training/sampling_rounds": float(len(self._rounds)),
            "training/groups_sampled": float(self._sampled),
            "training/groups_kept": float(len(self._kept)),
            "training/groups_missing": float(max(0, self._groups - len(self._kept))),
        }


def joined(rounds: Sequence[FieldStore], winners: np.ndarray) -> FieldStore:
    """The responses of all rounds to the prompts `winners`, as if one round had sampled them.

    `winners` int64 [G]: counters of prompts.
    """
    chosen = [np.flatnonzero(np.isin(r.uid[:, 0], winners)) for r in rounds]  # of the sampler's
    mine = [np.flatnonzero(np.isin(r.uid[r.own, 0], winners)) for r in rounds]  # of one's own
    starts = np.cumsum([0, *(len(index) for index in chosen)])
    own = [
        start + np.searchsorted(index, r.own[places])
        for start, index, r, places in zip(starts, chosen, rounds, mine, strict=False)
    ]
    first = rounds[0]

    def of_all(columns: Iterable[Sequence[Any]], indices: Sequence[np.ndarray]) -> Sequence[Any]:
        return _concatenated([take(c, index) for c, index in zip(columns, indices, strict=True)])

    return FieldStore(
        writers=first.writers,
        uid=of_all([r.uid for r in rounds], chosen),
        own=np.concatenate(own).astype(np.int64),
        values={
            value: of_all(
                [r.values[value] for r in rounds], chosen if first.is_shared(value) else mine
            )
            for value in first.values
        },
        columns={
            field: of_all([r.columns[field] for r in rounds], mine) for field in first.columns
        },
        sources=dict(first.sources),
        done=first.done,
    )


def _concatenated(columns: Sequence[Sequence[Any]]) -> Sequence[Any]:
    arrays = [column for column in columns if isinstance(column, np.ndarray)]
    if len(arrays) == len(columns) and len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    return [entry for column in columns for entry in column]
