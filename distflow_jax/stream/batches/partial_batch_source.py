"""The partial batches of one process: it tells its complete groups, and learns which go through
next.

When to gather: with partial batches of so many prompts, as soon as a process has its groups of the
next partial batch. With partial batches that are ready, as soon as a process has groups that could
fill a partial batch, if the others have as many; a process says so by a number that spreads
(parallel/peers.py), and the others join. So none waits in a loop of gathers, and a partial batch
that all of them together can fill is found: of P processes one has a P-th of it. A sampler that
needs newer weights brings a gather forward too, while no optimizer step has changed the weights
that it needs.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from distflow_jax.parallel.background_gather import BackgroundGather
from distflow_jax.parallel.peers import Peers
from distflow_jax.stream.batches.group_facts import GroupFacts, facts_of
from distflow_jax.stream.batches.partial_batches import PartialBatch, PartialBatchPlanner
from distflow_jax.stream.host_nodes import Group
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.publications import Publications

GATHERS = 0  # kind of the number of gathers that somebody wants to have begun

# what has to be true, and the first counter whose group it does not need
Wait = tuple[Callable[[], bool], int]


class Drive(Protocol):
    """`GroupStream.drive`: waits, and samples meanwhile."""

    def __call__(self, until: Callable[[], bool], *, needs: int = 0) -> None:
        """Waits until something is true, for which groups below a counter are needed."""


class PartialBatchSource:
    """Plans the partial batches of a run with the other processes. The thread that trains uses it.

    Attributes:
      planner: what all processes know alike.
    """

    def __init__(
        self,
        planner: PartialBatchPlanner,
        producer: Producer,
        gather: BackgroundGather,
        peers: Peers,
        *,
        judges: bool,
        publications: Publications | None = None,
        facts: Callable[[Group, int], GroupFacts] = facts_of,
    ):
        """`gather`, `peers`: nothing else uses them. `judges`: whether filter decisions reach the
        rule of the samplers by partial batches alone. `publications`: of weights; None: none while
        a step waits. `facts(group, process)`: of a group that is done."""
        self.planner, self._producer = planner, producer
        self._gather, self._peers = gather, peers
        self._judges, self._publications, self._facts_of = judges, publications, facts
        self._facts: dict[int, GroupFacts] = {}  # of this process's complete groups, by counter
        self._told: set[int] = set()  # counters of groups whose facts the others know
        self._gathers = 0

    def next(self, drive: Drive) -> PartialBatch:
        """The next partial batch of the step, once it is decided. Collective."""
        waits = self.waits()
        while True:
            try:
                until, needs = next(waits)
            except StopIteration as end:
                return end.value
            drive(until, needs=needs)

    def waits(self) -> Generator[Wait, None, PartialBatch]:
        """`next`, for a caller with a way of its own to wait: go on when what it yields is true."""
        while (partial_batch := self.planner.next()) is None:
            yield self._due, self.planner.cut.end
            self._gathers += 1
            self._peers.raise_to(GATHERS, self._gathers)
            asked = self._asked_for_weights()
            told = self._gather.begin([asked, self._news()])
            told.add_done_callback(lambda _: self._wake())
            yield told.done, 0
            asked_by, news = zip(*told.result(), strict=True)
            if self._publications is not None:
                self._publications.agree(self.planner.step - 1, asked_by)
            tables = enumerate(news)
            facts = [GroupFacts.from_json(buffer, row) for buffer, rows in tables for row in rows]
            self.planner.learn(facts)
            self._judge(facts)
        return partial_batch

    def _judge(self, facts: Sequence[GroupFacts]) -> None:
        """Tells filter decisions to the samplers, for which more groups of the step may begin at
        once."""
        if self._judges:
            with self._producer.lock:
                for group in facts:
                    self._producer.admission.judge(group.counter, group.keep)
                self._producer.lock.notify_all()

    def finish(self) -> None:
        """Ends a step whose last partial batch was taken."""
        end = self.planner.finish().end
        self._told = {counter for counter in self._told if counter >= end}
        self._facts = {c: facts for c, facts in self._facts.items() if c >= end}

    def close(self) -> None:
        """Ends the connections."""
        self._gather.close()
        self._peers.close()

    def _due(self) -> bool:
        """Whether it is time for the next gather."""
        self._peers.check()
        if self._asked_for_weights():
            return True
        with self._producer.lock:
            groups = list(self._producer.groups.values())
            end = self.planner.cut.end
            if not self._gathers and not any(group.done for group in groups):
                # a first group says which columns there are; without any there is none to come
                return not groups and self._producer.begun_up_to(end)
            wanted = self.planner.wanted()
            if wanted is not None:
                mine = [group for group in groups if group.counter < wanted]
                return self._producer.begun_up_to(wanted) and all(group.done for group in mine)
            if self._peers.seen(GATHERS) > self._gathers:
                return True
            mine = [group for group in groups if group.counter < end]
            news = [group for group in mine if group.done and group.counter not in self._told]
            whole = self._producer.begun_up_to(end) and all(group.done for group in mine)
        if whole or not news:
            return bool(news)
        tokens, sequences = self.planner.size(self._facts_about(news))
        missing = self.planner.missing()
        return any(
            n * self._peers.count >= most
            for n, most in zip((tokens, sequences), missing, strict=True)
        )

    def _asked_for_weights(self) -> bool:
        """Whether a sampler needs the weights that the step has begun with, which were not
        published, and which no mini-batch has changed yet."""
        if self._publications is None or self.planner.mini_batch:
            return False
        return self._publications.asked_for(self.planner.step - 1)

    def _news(self) -> Sequence[Any]:
        """Facts of complete groups of this process that the others do not know."""
        with self._producer.lock:
            groups = [g for g in self._producer.groups.values() if g.done]
        news = [group for group in groups if group.counter not in self._told]
        self._told |= {group.counter for group in news}
        return [facts.to_json() for facts in self._facts_about(news)]

    def _facts_about(self, groups: Sequence[Group]) -> list[GroupFacts]:
        """Facts of complete groups, which are found once for each."""
        for group in groups:
            if group.counter not in self._facts:
                self._facts[group.counter] = self._facts_of(group, self._peers.index)
        return [self._facts[group.counter] for group in groups]

    def _wake(self) -> None:
        with self._producer.lock:
            self._producer.lock.notify_all()
