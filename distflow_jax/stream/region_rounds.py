"""Filter decisions of a region after each of its rounds, with weight updates at boundaries."""

from concurrent.futures import Future
from typing import Any

from distflow_jax.cluster.background_gather import BackgroundGather
from distflow_jax.stream.producer import Producer


class RegionRounds:
    """Sends the filter decisions of a round's groups to all processes as soon as these groups end.

    All processes have the same rounds in the same order, each at its own time. For one thread only.
    """

    def __init__(self, producer: Producer, gather: BackgroundGather):
        """`gather`: nothing else uses it."""
        self._producer, self._gather = producer, gather
        self._known = producer.admission.position  # all filter decisions below are known everywhere
        self._told: tuple[int, Future[list[Any]]] | None = None  # of groups below, on their way

    def known(self, end: int) -> bool:
        """Whether all processes know the filter decisions of all groups below `end`; under the
        lock.

        All of these groups that are this process's have begun. Call it again while it is False.
        """
        if self._told is None:
            if end <= self._known:
                return True
            groups = [g for c, g in self._producer.groups.items() if self._known <= c < end]
            if not all(group.done for group in groups):
                return False
            told = self._gather.begin([(group.counter, group.keep) for group in groups])
            self._told = end, told
            told.add_done_callback(lambda _: self._producer.wake())
        end_of_round, told = self._told
        if not told.done():
            return False
        for counter, keep in (news for theirs in told.result() for news in theirs):
            self._producer.admission.judge(counter, bool(keep))
        self._known, self._told = end_of_round, None
        self._producer.wake()
        return end <= self._known

    def close(self) -> None:
        """Ends the connections."""
        self._gather.close()
