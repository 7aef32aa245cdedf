"""The agreement of all processes on the partial batches of a step, by successive gathers.

A process gathers as soon as its planner has enough to report (partial_batches.py). A planner that
spreads announces this by a counter (cluster/peers.py), so the other processes join. No process then
waits in a loop of gathers, and every decision that all of them together can make is found. Three
events trigger a gather early: a sampler that needs newer weights while no optimizer step has
changed them, a missing worker, and a prompt that was given up.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

from distflow_jax.cluster.background_gather import BackgroundGather
from distflow_jax.cluster.peers import Peers
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.coordinator.rounds import NO_WORKERS, Ended
from distflow_jax.stream.batches.group_facts import GroupFacts
from distflow_jax.stream.batches.partial_batches import PartialBatch, PartialBatchPlanner
from distflow_jax.stream.host_nodes import Group
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.publications import Publications

GATHERS = 0  # a kind of Peers: the number of gathers that somebody wants to have begun

# what has to be true, and the first counter whose group it does not need
Wait = tuple[Callable[[], bool], int]


class Agreement:
    """Decides partial batches together with the other processes. For the training thread only."""

    def __init__(
        self,
        planner: PartialBatchPlanner,
        producer: Producer,
        gather: BackgroundGather,
        peers: Peers,
        publications: Publications,
        config: StreamConfig,
        *,
        judges: bool,
        missing: Callable[[], Sequence[str]] = tuple,
    ):
        """`gather`: nothing else uses it. `judges`: whether filter decisions reach the rule of the
        samplers by this alone. `missing()`: nodes for which this process has no worker."""
        self._planner, self._producer = planner, producer
        self._gather, self._peers = gather, peers
        self._publications, self._config = publications, config
        self._judges, self._missing = judges, missing
        self._facts: dict[int, GroupFacts] = {}  # of this process's complete groups, by counter
        self._told: set[int] = set()  # counters of groups whose facts the others know
        self._gathers = 0

    def next(self, wait_until: Callable[..., None]) -> PartialBatch:
        """The next partial batch of the step, once it is decided. Collective.

        `wait_until(until, needs=)`: Driver.wait_until. Raises Ended where a process has waited for
        workers in vain.
        """
        waits = self.waits()
        while True:
            try:
                until, needs = next(waits)
            except StopIteration as end:
                return end.value
            wait_until(until, needs=needs)

    def waits(self) -> Generator[Wait, None, PartialBatch]:
        """`next`, for a caller with a way of its own to wait: go on when what it yields is true."""
        while (partial_batch := self._planner.next()) is None:
            end = self._planner.end
            yield lambda end=end: self._due(end), self._planner.cut.end
            told = self._tell()
            yield told.done, 0
            self._learn(told.result())
        return partial_batch

    def finish(self) -> None:
        """Ends a step whose last partial batch was taken."""
        taken = set(self._planner.finish().counters)
        self._told -= taken
        self._facts = {c: facts for c, facts in self._facts.items() if c not in taken}

    def close(self) -> None:
        """Ends the connections of gathers."""
        self._gather.close()

    def _due(self, end: int) -> bool:
        """Whether it is time for the next gather."""
        self._peers.check()
        if self._asked_for_weights() or self._missing():
            return True
        with self._producer.lock:
            groups = list(self._producer.groups.values())
            begun = self._producer.begun_up_to(end)
        if any(group.given_up and group.counter not in self._told for group in groups):
            return True  # others may begin in their place
        if self._peers.seen(GATHERS) > self._gathers:
            return True
        news = [facts for facts in self._news(groups) if facts.counter < end]
        whole = begun and all(group.done for group in groups if group.counter < end)
        return self._planner.due(whole, news, self._peers.count)

    def _tell(self) -> Future[list[Any]]:
        """Begins a gather of what the others do not know."""
        self._gathers += 1
        if self._planner.spreads:
            self._peers.raise_to(GATHERS, self._gathers)
        with self._producer.lock:
            groups = list(self._producer.groups.values())
        news = self._news(groups)
        self._told |= {facts.counter for facts in news}
        rows = [facts.to_json() for facts in news]
        told = self._gather.begin([self._asked_for_weights(), self._missing(), rows])
        told.add_done_callback(lambda _: self._producer.wake())
        return told

    def _learn(self, of_all: Sequence[Any]) -> None:
        asked, missing, tables = zip(*of_all, strict=True)
        if nodes := {node for theirs in missing for node in theirs}:
            raise no_workers(self._config, sorted(nodes))
        facts = [GroupFacts.from_json(i, row) for i, rows in enumerate(tables) for row in rows]
        with self._producer.lock:
            self._planner.learn(facts)
            for group in facts if self._judges else ():  # more of the step may begin at once
                self._producer.judge(group.counter, group.keep)
            self._producer.lock.notify_all()
        self._publications.agree(self._planner.step - 1, asked)

    def _asked_for_weights(self) -> bool:
        """Whether a sampler needs the weights that the step has begun with, which were not
        published, and which no mini-batch has changed yet."""
        if self._planner.mini_batch:
            return False
        return self._publications.asked_for(self._planner.step - 1)

    def _news(self, groups: Sequence[Group]) -> list[GroupFacts]:
        """Facts of complete groups that the others do not know, which are found once for each."""
        news = [group for group in groups if group.done and group.counter not in self._told]
        for group in news:
            if group.counter not in self._facts:
                self._facts[group.counter] = self._planner.facts_of(group, self._peers.index)
        return [self._facts[group.counter] for group in news]


def no_workers(config: StreamConfig, nodes: Sequence[str]) -> Ended:
    """The end of a run for want of workers for some nodes."""
    served = f" for {' and '.join(map(repr, nodes))} (worker --nodes)"  # beside those that sample
    return Ended(
        NO_WORKERS,
        more=f" for {config.no_workers_seconds:g} s{served if config.worker_nodes else ''}",
        fix="start again, with workers, to go on",
    )
