"""Task buffers: each process of the trainers is the task buffer of the groups that it trains on.

A worker asks a task buffer for work and gets groups with a lease. It brings back responses, and the
tokens of those under way. A lease that ends puts its group back, with the tokens that are known;
with `exact` versions no token of an unfinished response is kept, so such a response begins anew.
The first result of a response counts; a second one is dropped and counted. The rule of schedule.py
says which group may begin, by the version that the asking worker holds. A worker holds at most
twice as many responses as it has slots, and one group, the last one, while it is stalled.

Nothing here communicates, reads a clock, or looks into a token.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from distflow_jax.stream.leases import SAMPLING, Leased, Leases
from distflow_jax.stream.saved_samples import Key, Piece
from distflow_jax.stream.schedule import Rule

PIECES_BYTES = 160 << 20  # of one group's responses in a frame, which holds its images too
FRUITLESS_LEASES = 30  # for which news without a new token prolong a lease


@dataclasses.dataclass(frozen=True)
class Begun:
    """A group as a task buffer holds it from its beginning on."""

    key: Key
    step: int  # that trains it, at the latest
    samples: range
    order: tuple[float, ...]  # of groups of one step, lowest first
    content: Any  # what a worker needs to answer it
    size: int = 0  # bytes of it, where they are many


@dataclasses.dataclass(eq=False)
class OpenGroup(Leased):
    """A group of a task buffer whose responses have not all ended."""

    group: Begun
    floor: int  # lowest version that its tokens may have
    ended: dict[int, Piece] = dataclasses.field(default_factory=dict)
    under_way: dict[int, Piece] = dataclasses.field(default_factory=dict)
    last: str = ""  # worker that had the last lease
    brought: int = 0  # tokens that this one has shown
    moved: float = 0.0  # when these became more, or the lease began
    told: set[int] = dataclasses.field(default_factory=set)  # samples of which results differed

    def lease(self, worker: str, now: float, seconds: float) -> None:
        """Begins a lease, or prolongs it."""
        if self.last != worker:
            self.last, self.brought = worker, self.tokens
        if self.worker != worker:
            self.worker, self.moved = worker, now
        self.until = min(now + seconds, self.moved + FRUITLESS_LEASES * seconds)

    def sent(self) -> dict[int, Piece]:
        """Known responses that a worker gets, those that have ended first; ones beyond PIECES_BYTES
        it samples again."""
        found, size = {}, 0
        for sample, piece in (*self.ended.items(), *self.under_way.items()):
            size += piece.size
            if size <= PIECES_BYTES:
                found[sample] = piece
        return found

    @property
    def lacks(self) -> int:
        """Responses that have not ended."""
        return len(self.group.samples) - len(self.ended)

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        known = (*self.ended.values(), *self.under_way.values())
        return sum(piece.tokens for piece in known)


ANSWER_BYTES = 32 << 20  # of the groups that one question is answered by, but for the first one
QUOTA = 2  # responses of a worker for each of its slots: some have ended, and are on their way


@dataclasses.dataclass(frozen=True)
class Work:
    """A group that a worker answers, and what is known of its responses."""

    group: Begun
    pieces: Mapping[int, Piece]


@dataclasses.dataclass
class BufferCounts:
    """Numbers since the task buffer began."""

    given: int = 0  # groups that workers got
    second: int = 0  # responses that were there already
    refused: int = 0  # responses by weights that may not answer their group
    unknown: int = 0  # groups that nobody waits for (any more)
    differing: int = 0  # second responses that differ, with exact versions


class TaskBuffer:
    """The groups of one process, from their beginning until they are complete.

    Args:
      rule: says which versions may answer which step.
      exact: whether one version answers each step.
      version: of the newest weights; with `exact` it takes the place of older ones.
      lease_seconds: after which a group without news of its worker is given to another one.
      max_tries: failures of a group after which it is given up.
      differs: where two results of one response differ and should not; None: nowhere.

    Attributes:
      newest: version of the newest weights that workers can get.
      leases: of all that workers may hold, groups and what else the process gives them.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        exact: bool,
        version: int,
        lease_seconds: float,
        max_tries: int,
        differs: Callable[[Any, Any], Any] = lambda first, second: None,
    ):
        self.counts = BufferCounts()
        self.newest = version
        self._rule, self._exact, self._oldest = rule, exact, version
        self._differs = differs
        self.leases = Leases(lease_seconds, max_tries)
        self._complete: list[tuple[Begun, dict[int, Piece]]] = []
        self.differing: list[tuple[Key, int, Any]] = []

    # -- the trainer's side -----------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Notes weights that workers can get, newer than all before."""
        if version < self.newest:
            raise ValueError(f"version {version} is older than {self.newest}, which is published")
        self.newest = version

    def begin(self, group: Begun, pieces: Mapping[int, Piece]) -> None:
        """Takes a group that may begin; `pieces`: what an earlier run knew of its responses."""
        if group.key in self.leases.open:
            raise ValueError(f"the group of prompt {group.key[0]} has begun already")
        known = [piece.lowest for piece in pieces.values() if piece.tokens]
        floor = min([self.version_of(group.step), *known])
        held = OpenGroup(group, floor)
        held.ended = {s: p for s, p in pieces.items() if p.whole}
        held.under_way = {s: p for s, p in pieces.items() if not p.whole and p.tokens}
        self.leases.open[group.key] = held
        self._end_if_complete(held)

    def version_of(self, step: int) -> int:
        """The version that answers a step with exact versions, otherwise the oldest that may."""
        return max(self._oldest if self._exact else 0, self._rule.exact_version(step))

    def take(self) -> list[tuple[Begun, dict[int, Piece]]]:
        """Groups that are complete and were not taken, with their responses."""
        taken, self._complete = self._complete, []
        return taken

    def pieces(self) -> dict[Key, dict[int, Piece]]:
        """Responses of each group that was not taken, as far as they are known."""
        found = {group.key: dict(pieces) for group, pieces in self._complete}
        return found | {
            one.group.key: {**one.under_way, **one.ended} for one in self.leases.of(OpenGroup)
        }

    @property
    def tokens(self) -> int:
        """Tokens of all groups that were not taken."""
        complete = sum(p.tokens for _, pieces in self._complete for p in pieces.values())
        return complete + sum(one.tokens for one in self.leases.of(OpenGroup))

    @property
    def num_open(self) -> int:
        """Groups that are not complete."""
        return len(self.leases.of(OpenGroup))

    def ended(self, key: Key) -> set[int]:
        """The responses of a group that have ended, by sample; none of one that was taken."""
        found = self.leases.find(OpenGroup, key)
        whole = [group for group, _ in self._complete if group.key == key]
        return set(whole[0].samples) if whole else set(found.ended) if found else set()

    @property
    def has_news(self) -> bool:
        """Whether a group is complete and not taken."""
        return bool(self._complete)

    # -- the workers' side ------------------------------------------------------------------------

    def ask(self, worker: str, held: int, room: int, now: float, slots: int = 0) -> list[Work]:
        """Gives a worker that holds a version groups until there is no room for a response; a lease
        comes with each. Further ones wait for the next question where they are too large for one
        answer, or where the worker holds enough by the number of its slots; 0: by its room."""
        self.heard(worker, now)
        given: list[Work] = []
        if room <= 0:
            return given
        groups, stalled, size = self.leases.of(OpenGroup), worker in self.leases.stalled, 0
        most = 1 if stalled else QUOTA * slots if slots else room
        room = min(room, most - sum(one.lacks for one in groups if one.worker == worker))
        if room <= 0:
            return given
        steps = {step for step in {one.group.step for one in groups} if self._may(held, step)}
        waiting = self.leases.waiting(worker, [one for one in groups if one.group.step in steps])
        others = self.leases.at_work() - {worker}
        waiting.sort(key=_priority, reverse=bool(others) and stalled)
        for one in waiting:
            pieces = one.sent()
            size += one.group.size + sum(piece.size for piece in pieces.values())
            if room <= 0 or (given and size > ANSWER_BYTES):
                break
            room -= one.lacks
            one.lease(worker, now, self.leases.seconds)
            given.append(Work(one.group, pieces))
        self.counts.given += len(given)
        return given

    def wanted(self) -> list[int]:
        """Versions that an idle worker should hold, the most urgent first; never empty."""
        if not self._exact:
            return [self.newest]
        waiting = [one for one in self.leases.of(OpenGroup) if not one.worker]
        versions = sorted({self.version_of(one.group.step) for one in waiting})
        return [v for v in versions if v <= self.newest] or [self.newest]

    def bring(
        self,
        worker: str,
        key: Key,
        pieces: Mapping[int, Piece],
        now: float,
        *,
        goes_on: bool = True,
    ) -> bool:
        """Takes what a worker knows of a group's responses; whether it has the group from now on.

        Responses that have ended may be left out once they are known here. With `goes_on` the
        worker would work on: that prolongs its lease, and a worker whose lease has ended
        gets it back if it brings something and nobody else has it. Otherwise it is for others.
        """
        self.heard(worker, now)
        one = self.leases.find(OpenGroup, key)
        if one is None:
            self.counts.unknown += 1
            if any(piece.tokens for piece in pieces.values()):
                self.leases.stalled.discard(worker)
            return False
        lacked, brought = one.lacks, sum(piece.tokens for piece in {**one.ended, **pieces}.values())
        for sample, piece in pieces.items():
            self._learn(one, sample, piece)
        has = one.worker == worker
        lost = not one.worker and worker in one.silent
        if one.lacks < lacked or ((has or lost) and brought > one.brought):
            self.leases.stalled.discard(worker)
            one.brought, one.moved = max(brought, one.brought), now
        if self._end_if_complete(one):
            return False
        if goes_on and (has or (lost and worker not in self.leases.stalled)):
            one.lease(worker, now, self.leases.seconds)
            return True
        if has:
            one.free()
        return False

    def fail(self, worker: str, key: Key, why: str, now: float) -> None:
        """Notes that a worker cannot answer a group; see Leases.fail."""
        self.heard(worker, now)
        if self.leases.fail(worker, key, why):
            self._complete = [found for found in self._complete if found[0].key[0] != key[0]]

    def heard(self, worker: str, now: float) -> None:
        """Notes that a worker lives that samples."""
        self.leases.heard(worker, now, [SAMPLING])

    # -- one group --------------------------------------------------------------------------------

    def _may(self, held: int, step: int) -> bool:
        """Whether a version may answer groups of a step."""
        version = self.version_of(step)
        return held <= self.newest and (held == version if self._exact else held >= version)

    def _learn(self, one: OpenGroup, sample: int, piece: Piece) -> None:
        if sample not in one.group.samples:
            self.counts.unknown += 1
            return
        if sample in one.ended:
            if piece.whole:
                self.counts.second += 1
                where = None
                if self._exact:
                    where = self._differs(one.ended[sample].content, piece.content)
                if where is not None:
                    self.counts.differing += 1
                    if sample not in one.told:
                        one.told.add(sample)
                        self.differing.append((one.group.key, sample, where))
            return
        most = self.version_of(one.group.step) if self._exact else self.newest
        if piece.tokens and not (one.floor <= piece.lowest and piece.highest <= most):
            self.counts.refused += piece.whole
            return
        if piece.whole:
            one.ended[sample] = piece
            one.under_way.pop(sample, None)
        elif not self._exact:
            known = one.under_way.get(sample)
            if piece.tokens > (known.tokens if known else 0):
                one.under_way[sample] = piece

    def _end_if_complete(self, one: OpenGroup) -> bool:
        if len(one.ended) < len(one.group.samples):
            return False
        del self.leases.open[one.group.key]
        self._complete.append((one.group, one.ended))
        return True


def _priority(one: OpenGroup) -> tuple[float, ...]:
    """Earlier steps first, then what has begun, then the order of the groups."""
    begun = bool(one.ended or one.under_way)
    return (one.group.step, not begun, *one.group.order, one.group.key[0])
