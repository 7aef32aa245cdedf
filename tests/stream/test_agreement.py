"""Partial batches of several processes: the same on all of them, whatever is late, and none waits
forever.

A model has every order of events: a million of them are the nightly tier's, twenty thousand the
default one's. Processes with real connections run the same code.

Nightly: over 1,000,000 random events no process waits forever for a partial batch, and all have the
same.
"""

import random
import threading
import types

import pytest
from support.gathers import Gathers, dealt, exchanges, together

from distflow_jax.cluster.background_gather import BackgroundGather
from distflow_jax.cluster.peers import Peers
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.stream.batches.agreement import Agreement
from distflow_jax.stream.batches.group_facts import GroupFacts, decision_of
from distflow_jax.stream.batches.partial_batches import (
    CounterPlanner,
    PartialBatchRoom,
    ReadyPlanner,
)
from distflow_jax.stream.publications import Publications, PublishRule
from distflow_jax.stream.schedule import Admission, Rule

CONFIG = StreamConfig(max_staleness=1)


class Job:
    """The constants of a random job whose steps come in partial batches, and all of its groups."""

    def __init__(self, draw, steps):
        self.steps, self.salt = steps, draw.random()
        self.minis = draw.choice([1, 1, 2])
        self.judged = draw.random() < 0.3
        self.share = draw.choice([0.2, 0.6])  # of groups that are kept
        # each process has a group of every batch, as the loader's deal says
        self.processes = draw.randint(1, 4)
        size = max(draw.randint(1, 6), -(-self.processes // self.minis))
        self.rule = Rule(size * self.minis, draw.randint(1, 2), 5 if self.judged else 1)
        self.kind = draw.choice(["ready", "counter", "whole"])
        self.prompts, self.rows = draw.randint(1, 4), draw.randint(2, 6)
        self.longest, self.lost = draw.randint(1, 8), draw.choice([0, 0, 0.1, 0.5])
        # of weights that are not published after each step
        self.publishing = PublishRule(draw.choice([0.0, 0.5, 2.0]), self.rule.max_staleness)

    @property
    def spreads(self):
        return self.kind == "ready"

    def buffer(self, counter):
        return dealt(counter, self.rule.groups, self.processes, self.salt)

    def length(self, counter):
        """Tokens of a group."""
        if self.gives_up(counter):
            return 0
        return random.Random(f"{self.salt}{counter}l").randint(1, self.longest)

    def gives_up(self, counter):
        """Whether no worker can answer a prompt."""
        return random.Random(f"{self.salt}{counter}g").random() < self.lost

    def keeps(self, counter):
        """The filter decision on a group."""
        if self.gives_up(counter):
            return False
        return not self.judged or random.Random(f"{self.salt}{counter}k").random() < self.share

    def facts(self, group, process):
        draw = random.Random(f"{self.salt}{group.counter}x")
        responses = tuple(draw.randint(0, 12) for _ in range(2))
        prompt, first = draw.randint(1, 4), draw.randint(0, 2)
        return GroupFacts(group.counter, process, prompt, responses, first, 2, group.keep)

    def admission(self):
        return Admission(self.rule, steps=self.steps, judged=self.judged)

    def planner(self):
        """The planner of a process, which plans by a rule of its own."""
        if self.kind == "whole":
            return CounterPlanner(self.admission(), self.rule.groups, facts_of=decision_of)
        options = {"mini_batches": self.minis, "facts_of": self.facts}
        if self.kind == "ready":
            room = PartialBatchRoom(self.rows, RowLimits(16, 4, shared=False))
            return ReadyPlanner(self.admission(), room, **options)
        return CounterPlanner(self.admission(), self.prompts, **options)


class Process:
    """A process of a job: what an Agreement uses of a producer, and the training."""

    def __init__(self, job, index, make_parts, news):
        """`make_parts()`: the gather and the peers, which may call `wake` at once; `news`: peers of
        samplers that starve."""
        self.job, self.index, self.lock = job, index, threading.Condition()
        self.version, self.admission = 0, job.admission()
        self.groups, self.seen, self.begun = {}, set(), 0
        self.publications = Publications(job.publishing, self, news, self.bring)
        self.published, self.partial_batches, self.cuts = [], [], []
        self.planner = job.planner()
        parts = make_parts()
        self.agreement = Agreement(
            self.planner, self, *parts, self.publications, CONFIG, judges=True
        )

    # -- what a producer has ----------------------------------------------------------------------

    def wake(self):
        with self.lock:
            self.lock.notify_all()

    def begun_up_to(self, end):
        return self.begun >= end

    def judge(self, counter, keep):
        self.admission.judge(counter, keep)
        if not (keep or self.job.judged):
            self.groups.pop(counter, None)

    def admit(self, held=None):
        """Begins what the rule allows."""
        end = self.admission.end(self.admission.finished if held is None else held)
        for counter in range(self.admission.position, end):
            if self.job.buffer(counter) == self.index and counter not in self.seen:
                self.seen.add(counter)
                self.groups[counter] = types.SimpleNamespace(
                    counter=counter,
                    done=False,
                    given_up=False,
                    keep=self.job.keeps(counter),
                    left=self.job.length(counter),
                )
        self.begun = max(self.begun, end)

    # -- events -----------------------------------------------------------------------------------

    @property
    def ended(self):
        return self.admission.finished == self.job.steps

    @property
    def late(self):
        return [group for group in self.groups.values() if not group.done]

    def sample(self, draw):
        """A token of a group, or the end of its rewards; whether there was anything to do."""
        if not self.late:
            return False
        group = draw.choice(self.late)
        if group.left:
            group.left -= 1
        else:
            group.done, group.given_up = True, self.job.gives_up(group.counter)
        return True

    def bring(self, version):
        """Weights of the step's beginning; no mini-batch has changed them."""
        assert version == self.admission.finished and not self.planner.mini_batch
        self.published.append((version, len(self.partial_batches)))

    def begin(self):
        """Begins a step where none is under way."""
        if not self.partial_batches or self.partial_batches[-1].last:
            assert self.planner.begin(self.admission.finished + 1)

    def train(self, partial_batch):
        """Trains a partial batch; after the last one the step ends, and its groups are gone."""
        self.partial_batches.append(partial_batch)
        if not partial_batch.last:
            return
        step = partial_batch.step
        with self.lock:
            self.agreement.finish()
            self.cuts.append(self.admission.finish(step))
            for counter in self.cuts[-1].counters:
                self.groups.pop(counter, None)
        divergence = random.Random(f"{self.job.salt}{step}d").random()
        newest = self.publications.newest
        if self.job.publishing.publishes(step, newest, divergence, starving=False):
            self.publications.publish(step)


class Modelled(Process):
    """A process whose gathers and numbers are events."""

    def __init__(self, job, index, gathers, raised):
        self.heard = self.starving = 0
        peers = types.SimpleNamespace(
            raise_to=raised,
            seen=lambda kind: self.heard,
            check=lambda: None,
            index=index,
            count=job.processes,
        )
        news = types.SimpleNamespace(seen=lambda kind: self.starving)
        super().__init__(job, index, lambda: (gathers.of(index), peers), news)
        self.running, self.until = None, lambda: True

    def starves(self):
        """Whether there is nothing to do with the newest weights, and others would help."""
        newest = self.publications.newest
        whole = not self.late and self.begun >= self.admission.end(newest)
        return self.job.publishing.skips and whole and newest < self.admission.finished

    def go_on(self):
        """Goes on with the training until it waits; at the end of a step it rests."""
        while self.until():
            if self.running is None:
                self.begin()
                self.running = self.agreement.waits()
            try:
                self.until, _ = next(self.running)
            except StopIteration as end:
                self.running, self.until = None, lambda: True
                self.train(end.value)
                if end.value.last:
                    return

    def events(self, draw, wanted, starving):
        """Events that may happen here: calls, and their arguments."""
        newest = self.publications.newest
        held = min(newest, draw.randint(0, self.job.steps))
        if not self.ended and self.until():
            yield self.go_on, ()
        if self.begun < self.admission.end(newest):
            yield self.admit, (held,)
        if self.late:
            yield self.sample, (draw,)
        if self.starving < starving:
            yield vars(self).update, ({"starving": starving},)
        if self.heard < wanted:
            yield vars(self).update, ({"heard": wanted},)


def check(world, job):
    """All processes trained the same, each group in one partial batch."""
    first = world[0]
    for process in world:
        assert process.partial_batches == first.partial_batches and process.cuts == first.cuts
        assert process.published == first.published
    for cut in first.cuts:
        mine = [one for one in first.partial_batches if one.step == cut.step]
        assert [one.last for one in mine] == [False] * (len(mine) - 1) + [True]
        assert sorted(c for one in mine for c in one.counters) == list(cut.kept)
        assert len(mine) == 1 or job.kind in ("counter", "ready")


def model(seed, steps):
    """Runs a random job to its end, one random event after the other; returns their number."""
    draw = random.Random(seed)
    job = Job(draw, steps)
    gathers, wanted, starving = Gathers(job.processes), [0], 0

    def raised(kind, number):
        wanted[0] = max(wanted[0], number if job.spreads else 0)

    world = [Modelled(job, i, gathers, raised) for i in range(job.processes)]
    events = 0
    while not all(process.ended for process in world):
        events += 1
        starving = max([starving, *(p.publications.newest + 1 for p in world if p.starves())])
        choices = [event for p in world for event in p.events(draw, wanted[0], starving)]
        choices += [(future.set_result, (values,)) for future, values in gathers.ready()]
        assert choices, f"seed {seed}: nothing can happen, and steps are left"
        what, given = draw.choice(choices)
        what(*given)
    check(world, job)
    check_gathers([values for values, _ in gathers.begun])
    return events


def check_gathers(gathers):
    """Each tells something, or nobody would have begun it; what was told is not told again."""
    counters = []
    for told in gathers:
        assert any(asked or rows for asked, _, rows in told.values())
        counters += [row[0] for *_, rows in told.values() for row in rows]
    assert len(counters) == len(set(counters))


def test_processes_of_a_model_agree_and_never_wait_forever():
    total = seed = 0
    while total < 20_000:
        total += model(seed, 4)
        seed += 1


@pytest.mark.slow
def test_a_million_events():
    total, seed = 0, 10_000
    while total < 1_000_000:
        total += model(seed, 8)
        seed += 1


class Threaded(Process):
    """A process of a job of threads, with real connections."""

    def __init__(self, job, index, pair, seed):
        self.draw = random.Random(f"{seed}{index}")

        gather, spread = pair
        if not job.spreads:
            spread.close()
            spread = None

        def parts():
            self.peers = Peers(spread, index, job.processes, self.wake)
            return BackgroundGather(gather), self.peers

        super().__init__(job, index, parts, None)

    def drive(self, until, *, needs=0):
        while not until():
            with self.lock:
                self.admit()
                if not self.sample(self.draw) or self.draw.random() < 0.1:
                    self.lock.wait(self.draw.uniform(0, 0.003))

    def run(self):
        while not self.ended:
            self.begin()
            self.train(self.agreement.next(self.drive))


@pytest.mark.parametrize("seed", range(6))
def test_processes_with_connections_agree(seed):
    job = Job(random.Random(seed), 5)
    job.publishing = PublishRule(0.0, job.rule.max_staleness)  # no sampler of a thread starves
    pairs = list(zip(*(exchanges(job.processes) for _ in range(2)), strict=True))

    def run(index):
        process = Threaded(job, index, pairs[index], seed)
        process.run()
        return process

    world = together(job.processes, run)
    check(world, job)
    for process in world:
        process.agreement.close()
        process.peers.close()
