"""Standings: how much each worker of a home may hold, by what it has brought.

A worker may claim everything and give nothing: its device hangs, or its program is broken. Then
each lease would end without a result, and the worker that asks first would get the group again. So

- a new worker holds its share at most, that of one of the workers that live; alone it may hold all
- one that has finished responses may hold twice as many as these
- where a lease has ended, a worker has no share any more, and half of what it had finished counts
- a worker that brought nothing for a whole lease has lapsed: nothing of what it had finished
  counts, and it gets a group at a time, after a time that doubles with each lapse. Until it brings
  something it does not count as a worker that lives

Nothing here reads a clock.
"""

import dataclasses
import math
from collections.abc import Collection

DOUBLINGS = 5  # of the time for which a worker that has lapsed gets nothing: 32 leases at most
REMEMBERED_LEASES = 64  # for which a lapse is known of a worker that is silent
MOST_REMEMBERED = 1024  # silent workers


@dataclasses.dataclass
class _Standing:
    """Deeds of one worker."""

    finished: int = 0  # as far as it counts
    news: float = -math.inf  # when it last brought something
    new: bool = True  # none of its leases has ended
    lapses: int = 0  # since it last brought something
    lapsed: float = -math.inf  # when it lapsed last
    barred: float = -math.inf  # until then it gets nothing
    told: bool = False  # of its lapses


class Standings:
    """The standings of the workers of a home.

    Attributes:
      lapsed: workers that have lapsed for the first time, for the log; the caller takes them out.
    """

    def __init__(self, lease_seconds: float):
        """`lease_seconds`: after which a lease ends without news."""
        self._lease_seconds = lease_seconds
        self._known: dict[str, _Standing] = {}
        self.lapsed: list[str] = []

    def __len__(self) -> int:
        return len(self._known)

    def note(self, worker: str, finished: int, now: float) -> None:
        """Notes that a worker has brought something, and how much it has finished of its work."""
        one = self._known.setdefault(worker, _Standing())
        one.finished += finished
        one.news, one.lapses, one.barred = now, 0, -math.inf

    def end(self, worker: str, since: float, now: float) -> None:
        """Notes that a lease of a worker has ended, which was given or prolonged last at `since`.

        One call for all leases that end at a time, with the latest `since` of them.
        """
        one = self._known.setdefault(worker, _Standing())
        one.new, one.finished = False, one.finished // 2
        if one.news > since:  # it has brought something else
            return
        one.finished = 0
        if now < one.barred:
            return  # a lease of before
        one.lapsed, one.lapses = now, one.lapses + 1
        one.barred = now + 2 ** min(one.lapses - 1, DOUBLINGS) * self._lease_seconds
        if not one.told:
            one.told = True
            self.lapsed.append(worker)

    def gives(self, worker: str) -> bool:
        """Whether a worker has not lapsed."""
        one = self._known.get(worker)
        return one is None or not one.lapses

    def giving(self, workers: Collection[str]) -> set[str]:
        """The workers that have not lapsed, of some."""
        return {worker for worker in workers if self.gives(worker)}

    def most(self, worker: str, work: int, others: int, now: float) -> float:
        """How much a worker may hold; below its first piece of work it may begin one always.

        `work`: that is not finished, of all workers and of none; `others`: the number of other
        workers that live and have not lapsed.
        """
        one = self._known.get(worker, _Standing())
        if one.lapses:
            return 0 if now < one.barred else 1
        if one.new and not others:
            return math.inf
        share = math.ceil(work / (others + 1)) if one.new else 1
        return max(share, 2 * one.finished)

    def keep(self, alive: Collection[str], now: float) -> None:
        """Forgets workers that are gone; a lapse is known for some time."""
        end = now - REMEMBERED_LEASES * self._lease_seconds
        silent = [w for w in self._known if w not in alive]
        for worker in silent:
            one = self._known[worker]
            if not one.lapses or one.lapsed <= end:
                del self._known[worker]
        silent = [w for w in silent if w in self._known]
        for worker in silent[: max(0, len(silent) - MOST_REMEMBERED)]:
            del self._known[worker]
