"""The rule of staggered swaps: which samplers may pause for new weights, as one of them sees it.

Samplers form m classes by their number, n modulo m. A published version v goes to one class after
the other, beginning with class v modulo m; a class has its turn once all samplers of the one before
have taken v or newer weights. Rounds follow each other: the turns of v come after all turns of the
versions before it, in which samplers take the newest weights already. So samplers of one class at
most pause at a time.

A class that takes too long is passed over, and not waited for again until one of its samplers has
said that it has taken weights. The deadline follows from this sampler's own swaps.

A sampler that cannot begin anything with the weights it holds takes newer ones whosever turn it
is: the bound on the age of tokens goes before the turns.

Nothing here communicates or reads a clock.
"""

import collections
from collections.abc import Sequence

FIRST_SECONDS = 60.0  # for a turn, before this sampler has taken weights itself
LEAST_SECONDS = 1.0  # for a turn: a decode call ends, the weights arrive, a message travels
TIMES = 4.0  # a turn may last so many times as long as the longest of this sampler's own


def takes_now(*, busy: bool, ready: bool, idle_slots: bool, wanted: bool, turn: bool) -> bool:
    """Whether a sampler takes weights that were published, of versions newer than its own.

    `busy`: it has something under way; `ready`: the weights are there; `idle_slots`: slots are free
    and nothing that may begin waits for them; `wanted`: somebody waits for it to hold these
    weights; `turn`: it may pause.
    """
    if not busy:
        return True  # even if it has to wait for them
    return ready and (turn or idle_slots or wanted)


class SwapTurns:
    """Turns of all samplers, as the sampler `index` of `samplers` sees them; in `classes` classes.

    Raises ValueError unless each class has a sampler.
    """

    def __init__(self, index: int, samplers: int, classes: int):
        if not 1 <= classes <= samplers:
            raise ValueError(f"{samplers} samplers cannot form {classes} classes")
        self._index, self._own = index, index % classes
        self._members = [range(number, samplers, classes) for number in range(classes)]
        self._rounds: collections.deque[int] = collections.deque()  # versions, not at their end
        self._place = 0  # classes whose turn in the first of these rounds is over
        self._since: float | None = None  # when the present turn began, as far as is known here
        self._longest = 0.0  # seconds of this sampler's own swaps and turns
        self._silent: dict[int, list[int]] = {}  # passed over -> what its samplers had taken then

    def publish(self, version: int) -> None:
        """Notes a version that was published, later than all before."""
        self._rounds.append(version)

    def mine(self, taken: Sequence[int], now: float) -> bool:
        """Whether this sampler may pause now to take the newest weights.

        `taken`: versions of the weights that all samplers have, by their number, as far as this
        one has heard; `now`: seconds of a clock that does not go back.
        """
        while self._rounds:
            version, place = self._rounds[0], self._place
            number = (version + place) % len(self._members)
            if any(taken[n] < version for n in self._members[number]):
                if number == self._own and taken[self._index] < version:
                    self._begin(now)
                    return True
                if self._waits(number, taken, now):
                    return False
            self._end_turn()
        return False

    def took(self, seconds: float, now: float) -> None:
        """Notes that this sampler has taken weights, in so many seconds."""
        of_own_turn = self._since is not None and self._is_own()
        turn = now - self._since if of_own_turn else 0.0  # the wait for the weights included
        self._longest = max(self._longest, seconds, turn)

    @property
    def patience(self) -> float:
        """Seconds that a class may take for its turn."""
        return max(LEAST_SECONDS, TIMES * self._longest) if self._longest else FIRST_SECONDS

    def _waits(self, number: int, taken: Sequence[int], now: float) -> bool:
        """Whether to wait for a class whose turn it is."""
        known = [taken[n] for n in self._members[number]]
        if self._silent.get(number) == known:
            return False
        self._begin(now)
        if now - self._since <= self.patience:
            return True
        self._silent[number] = known
        return False

    def _is_own(self) -> bool:
        """Whether the present turn is that of this sampler's class."""
        if not self._rounds:
            return False
        return (self._rounds[0] + self._place) % len(self._members) == self._own

    def _begin(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def _end_turn(self) -> None:
        self._since = None
        self._place += 1
        if self._place == len(self._members):
            self._rounds.popleft()
            self._place = 0
