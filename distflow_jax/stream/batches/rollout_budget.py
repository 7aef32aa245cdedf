"""The end of a rollout by a budget of tokens, which all processes see at the same point.

A rollout ends once that many tokens were sampled in it, over all processes, or its step is full;
and once the groups that the step must train are complete. Each process counts its own tokens and
groups, and all gather these numbers: first when one of P processes has a P-th of the tokens that
are missing, or of the groups that fill the step; then whenever a group ends that the step waits
for. A number that spreads (parallel/peers.py) has the others join. Samplers decode meanwhile.
"""

from collections.abc import Generator
from typing import Any

from distflow_jax.parallel.background_gather import BackgroundGather
from distflow_jax.parallel.peers import Peers
from distflow_jax.stream.batches.partial_batch_source import GATHERS, Drive, Wait
from distflow_jax.stream.deadlines import Deadlines, Taken
from distflow_jax.stream.producer import Producer


class RolloutBudget:
    """Ends the rollouts of a run with the other processes. The thread that trains uses it."""

    def __init__(
        self,
        producer: Producer,
        admission: Deadlines,
        gather: BackgroundGather,
        peers: Peers,
        *,
        tokens: int,
    ):
        """`admission`: the producer's. `gather`, `peers`: nothing else uses them. `tokens`: of a
        rollout, over all processes."""
        self._producer, self._admission = producer, admission
        self._gather, self._peers = gather, peers
        self._budget = tokens
        self._told: set[int] = set()  # counters of complete groups that the others know
        self._gathers = 0
        self._start = 0  # tokens of this process before the rollout
        self._told_tokens = 0  # and those that the others know
        self._known = 0  # tokens of the rollout that all processes know

    def end(self, drive: Drive) -> Taken:
        """Samples until the rollout ends; returns the groups of its step. Collective."""
        waits = self.waits()
        while True:
            try:
                until, needs = next(waits)
            except StopIteration as end:
                return end.value
            drive(until, needs=needs)

    def waits(self) -> Generator[Wait, None, Taken]:
        """`end`, for a caller with a way of its own to wait: go on when what it yields is true."""
        admission = self._admission
        step, self._known = admission.finished + 1, 0
        self._told_tokens = self._start
        while not self._over():
            yield self._due, admission.end(admission.finished)
            self._gathers += 1
            self._peers.raise_to(GATHERS, self._gathers)
            told = self._gather.begin(self._news())
            told.add_done_callback(lambda _: self._wake())
            yield told.done, 0
            with self._producer.lock:
                for tokens, counters in told.result():
                    self._known += tokens
                    for counter in counters:
                        admission.complete(counter)
        cut = admission.cut(step)
        self._told -= set(cut.kept)
        return cut

    def sampled(self) -> int:
        """Tokens that this process has sampled in the rollout, which has ended; those after it are
        of the next one."""
        with self._producer.lock:
            before, self._start = self._start, self._producer.counts().tokens
        return self._start - before

    def close(self) -> None:
        """Ends the connections."""
        self._gather.close()
        self._peers.close()

    def _over(self) -> bool:
        """Whether the rollout has ended, by what all processes know."""
        admission = self._admission
        if admission.awaited() is not None:
            return False
        return self._known >= self._budget or not admission.lacking

    def _due(self) -> bool:
        """Whether it is time for the next gather."""
        self._peers.check()
        with self._producer.lock:
            groups = list(self._producer.groups.values())
            done = [group.counter for group in groups if group.done]
            if not self._gathers and groups and not done:
                return False  # a first group says which columns there are
            news = [counter for counter in done if counter not in self._told]
            tokens = self._producer.counts().tokens - self._told_tokens
        if self._peers.seen(GATHERS) > self._gathers:
            return True
        if len(done) == len(groups):  # nothing is under way here
            return bool(news or tokens)
        missing, lacking = self._budget - self._known, self._admission.lacking
        if missing > 0 and lacking:
            shares = (tokens, missing), (len(news), lacking)
            return any(mine * self._peers.count >= all_of_it for mine, all_of_it in shares)
        awaited = self._admission.awaited()
        return awaited is not None and any(counter < awaited for counter in news)

    def _news(self) -> list[Any]:
        """Tokens and complete groups of this process that the others do not know."""
        with self._producer.lock:
            groups = self._producer.groups.values()
            news = [g.counter for g in groups if g.done and g.counter not in self._told]
            tokens = self._producer.counts().tokens
        untold, self._told_tokens = tokens - self._told_tokens, tokens
        self._told |= set(news)
        return [untold, news]

    def _wake(self) -> None:
        with self._producer.lock:
            self._producer.lock.notify_all()
