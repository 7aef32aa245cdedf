"""The workers of a home: what each has reported, and what each gets."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from distflow_jax.flow.dispatch.dispatch_rule import Load, Offer, Pace, choose

MOST_PACES = 64  # of a report


@dataclasses.dataclass(frozen=True)
class Report:
    """Numbers that a worker sends with each question for work."""

    slots: int = 0  # 0: it does not say
    active: int = 0  # responses that have a slot, or wait for one
    pace: Pace = ()

    def facts(self) -> dict[str, Any]:
        """JSON values for a frame."""
        return dataclasses.asdict(self)

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> "Report":
        """Inverse of `facts`. ValueError for numbers that no worker measures."""
        try:
            pace = tuple(sorted((float(n), float(seconds)) for n, seconds in facts["pace"]))
            found = cls(int(facts["slots"]), int(facts["active"]), pace)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"a worker's report cannot be read ({error!r})") from error
        numbers = [n for entry in pace for n in entry]
        fine = len(pace) <= MOST_PACES and 0 <= found.active <= found.slots
        if not fine or any(not 0 <= n < math.inf for n in numbers) or 0.0 in dict(pace).values():
            raise ValueError(f"a worker's report has numbers that cannot be: {found}")
        return found


class Fleet:
    """The workers of one home."""

    def __init__(self, dispatch: str = "longest", *, exact: bool = False):
        """`dispatch`: one of DISPATCHES. `exact`: whether only workers of one version answer a
        step."""
        self._dispatch, self._exact = dispatch, exact
        self._reports: dict[str, Report] = {}  # the last one of each worker, by name
        self._held: dict[str, int] = {}

    def hear(self, worker: str, held: int, report: Report | None) -> None:
        """Notes the version that a worker holds, and what it says of itself."""
        if report is not None:
            self._reports[worker], self._held[worker] = report, held

    def keep(self, alive: Collection[str]) -> None:
        """Forgets the workers that do not live."""
        if self._reports.keys() - alive:
            self._reports = {w: r for w, r in self._reports.items() if w in alive}
            self._held = {w: self._held[w] for w in self._reports}

    def chosen(
        self,
        asker: str,
        room: int,
        offers: Sequence[Offer],
        given: Iterable[tuple[str, Offer]],
        alive: Collection[str],
    ) -> int:
        """How many of the offers a worker gets, from the first on.

        `given`: what workers have of this home; `alive`: the workers that live.
        """
        reports = {
            w: r
            for w, r in self._reports.items()
            if r.slots and w in alive and self._may_answer(w, asker)
        }
        if self._dispatch == "longest" or asker not in reports:
            return choose(offers, room, asker, {})
        offers = list(offers)  # each is looked at several times
        of_worker: dict[str, list[Offer]] = {name: [] for name in reports}
        for worker, offer in given:
            of_worker.setdefault(worker, []).append(offer)
        known = [report.pace for _, report in sorted(reports.items()) if report.pace]
        fleet = {}
        for name, report in sorted(reports.items()):
            theirs = of_worker[name]
            active = report.active
            if name != asker:  # it may have got something since it said so
                active = max(active, min(report.slots, sum(o.responses for o in theirs)))
            fleet[name] = Load(
                report.slots,
                min(active, report.slots),
                max((o.length for o in theirs), default=0.0),
                sum(o.tokens for o in theirs),
                report.pace or (known or [()])[0],  # one that has just joined: as another one
            )
        return choose(offers, room, asker, fleet)

    def _may_answer(self, worker: str, asker: str) -> bool:
        """Whether a worker may answer what another one is offered."""
        return not self._exact or self._held.get(worker) == self._held.get(asker)
