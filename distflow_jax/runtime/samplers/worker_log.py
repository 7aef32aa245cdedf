"""Log lines of a trainer on its workers: who joins, leaves, stalls, is lost or is missing."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

SUM_SECONDS = 5.0  # between two words on moves: thousands of workers make few lines
MOST_NAMES = 3  # of workers in one line
WORDS = {
    "joined": "joined",
    "left": "left",
    "stalled": "stalled: called, but submitted nothing of {its} groups for a lease; these go to "
    "other workers, and a stalled worker gets one group at a time until it submits something",
    "lost": "sent nothing for {seconds:.0f} s{groups}",
}

log = logging.getLogger("distflow_jax")


class Move(NamedTuple):
    """A worker that has joined, left, stalled, or is lost: see Leases.moves."""

    worker: str
    what: str
    groups: int = 0
    seconds: float = 0.0


class WorkerLog:
    """The log of one process. `how`: the command that starts a worker; `record(event, facts)`
    writes an event of the run."""

    def __init__(
        self, how: str, record: Callable[[str, Mapping[str, Any]], None] = lambda *event: None
    ):
        self._how, self._record, self._next = how, record, 0.0
        self._moves: list[Move] = []
        self._met = False  # whether a worker has ever joined

    def moved(self, moves: Sequence[tuple[str, str, int, float]], at_work: int, now: float) -> None:
        """Tells of moves of workers, of which `at_work` are left: at once, or with those of the
        next seconds where it has just told of some."""
        self._moves += [Move(*move) for move in moves]
        self._met |= at_work > 0
        if not self._moves or now < self._next:
            return
        self._next = now + SUM_SECONDS
        for what in WORDS:
            if of_kind := [move for move in self._moves if move.what == what]:
                level = logging.INFO if what in ("joined", "left") else logging.WARNING
                log.log(level, "%s (%d at work)", sentence(what, of_kind), at_work)
                names = [move.worker for move in of_kind[:MOST_NAMES]]
                facts = {"what": what, "names": names, "count": len(of_kind), "at_work": at_work}
                self._record("workers", facts)
        self._moves = []

    def missing(self, seconds: float, groups: int, node: str, lacking: bool) -> None:
        """Tells that no worker was there for some seconds, while groups wait for one; `node`: of a
        host node that it would run, `lacking`: prompts wait to be drawn as well."""
        which = f" that runs node {node!r}" if node else ""
        log.warning(
            "waiting for samples: no worker%s %s, and %d prompts are waiting for one%s; unless a "
            "worker is already starting, start one: %s%s",
            which,
            f"was at work for {seconds:.0f} s" if self._met else "has joined",
            groups,
            ", and further ones cannot begin" if lacking else "",
            self._how,
            f" --nodes={node}" if node else " (with its --engine, if it had one)" * self._met,
        )


def sentence(what: str, moves: Sequence[Move]) -> str:
    """A sentence on workers that have made the same move."""
    names = ", ".join(move.worker for move in moves[:MOST_NAMES])
    more = f" and {len(moves) - MOST_NAMES} more" if len(moves) > MOST_NAMES else ""
    groups = sum(move.groups for move in moves)
    one = len(moves) == 1
    its = "its" if one else "their"
    words = WORDS[what].format(
        its=its,
        seconds=max(move.seconds for move in moves),
        groups=f"; {its} {groups} group{'' if groups == 1 else 's'} go to other workers"
        if groups
        else "",
    )
    return f"worker{'' if one else 's'} {names}{more} {words}"
