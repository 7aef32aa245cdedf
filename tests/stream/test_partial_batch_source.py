"""Partial batches of several processes: the same on all of them, whatever is late, and none waits
forever.

A model has every order of events: a million of them are the nightly tier's, twenty thousand the
default one's. Processes with real connections run the same code.
"""

import random
import threading
import types

import pytest
from support.gathers import Gathers, dealt, exchanges, together

from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.parallel.background_gather import BackgroundGather
from distflow_jax.parallel.peers import Peers
from distflow_jax.stream.batches.group_facts import GroupFacts
from distflow_jax.stream.batches.partial_batch_room import PartialBatchRoom
from distflow_jax.stream.batches.partial_batch_source import PartialBatchSource
from distflow_jax.stream.batches.partial_batches import PartialBatchPlanner
from distflow_jax.stream.publications import Publications
from distflow_jax.stream.publish_rule import PublishRule
from distflow_jax.stream.schedule import Admission, Rule


class Job:
    """The constants of a random job, and all of its groups."""

    def __init__(self, draw):
        self.minis = draw.choice([1, 1, 2])
        self.judged = draw.random() < 0.3
        self.share = draw.choice([0.2, 0.6])  # of groups that are kept
        # each process has a group of every batch, as the loader's deal says
        self.processes = draw.randint(1, 4)
        size = max(draw.randint(1, 6), -(-self.processes // self.minis))
        self.rule = Rule(size * self.minis, draw.randint(1, 2), 5 if self.judged else 1)
        self.prompts = draw.choice([None, draw.randint(1, 4)])
        self.rows, self.salt = draw.randint(2, 6), draw.random()
        # of weights that are not published after each step
        self.publishing = PublishRule(draw.choice([0.0, 0.5, 2.0]), self.rule.max_staleness)
        self.buffers: dict[int, int] = {}

    def buffer(self, counter):
        return dealt(counter, self.rule.groups, self.processes, self.salt)

    def facts(self, counter):
        draw = random.Random(f"{self.salt}{counter}x")
        return GroupFacts(
            counter=counter,
            buffer=self.buffer(counter),
            prompt=draw.randint(1, 4),
            responses=tuple(draw.randint(0, 12) for _ in range(2)),
            first=draw.randint(0, 2),
            last=2,
            keep=not self.judged or draw.random() < self.share,
        )

    def planner(self):
        room = None if self.prompts else PartialBatchRoom(self.rows, RowLimits(16, 4, shared=False))
        admission = Admission(self.rule, judged=self.judged)
        return PartialBatchPlanner(
            admission, mini_batches=self.minis, prompts=self.prompts, room=room
        )


class Modelled:
    """A process of a model: its groups, its partial batches, and what it waits for."""

    def __init__(self, job, index, gathers, raised):
        self.job, self.index, self.lock = job, index, threading.Condition()
        self.version, self.starving = 0, 0
        news = types.SimpleNamespace(seen=lambda kind: self.starving)
        self.publications = Publications(job.publishing, self, news, self.publish)
        self.published = []
        self.admission = Admission(job.rule, judged=job.judged)  # of the sampler
        self.groups, self.begun, self.heard = {}, 0, 0
        peers = types.SimpleNamespace(
            raise_to=raised,
            seen=lambda kind: self.heard,
            check=lambda: None,
            index=index,
            count=job.processes,
        )
        self.source = PartialBatchSource(
            *(job.planner(), self, gathers.of(index), peers),
            judges=True,
            publications=self.publications,
            facts=lambda group, process: job.facts(group.counter),
        )
        self.partial_batches, self.running, self.until = [], None, lambda: True

    def begun_up_to(self, end):
        return self.begun >= end

    def publish(self, version):
        """Weights of the step's beginning; no mini-batch has changed them."""
        assert version == self.admission.finished and not self.source.planner.mini_batch
        self.publications.newest = version
        self.published.append((version, len(self.partial_batches)))

    def starves(self):
        """Whether there is nothing to do with the newest weights, and others would help."""
        newest, rule = self.publications.newest, self.job.publishing
        idle = all(group.done for group in self.groups.values())
        whole = self.begun >= self.admission.end(newest)
        return rule.skips and idle and whole and newest < self.admission.finished

    def begin(self, held):
        """Begins what the rule allows."""
        end = self.admission.end(held)
        for counter in range(self.begun, end):
            if self.job.buffer(counter) == self.index:
                self.groups[counter] = types.SimpleNamespace(counter=counter, done=False)
        self.begun = max(self.begun, end)

    def finish(self, step):
        """The cut of a step that is over; its groups are forgotten."""
        self.source.finish()
        cut = self.admission.finish(step)
        for counter in range(cut.start, cut.end):
            self.groups.pop(counter, None)
        return cut

    def go_on(self):
        """Goes on with the training until it waits; at the end of a step it begins the next."""
        while self.until():
            if self.running is None:
                self.running = self.source.waits()
            try:
                self.until, _ = next(self.running)
            except StopIteration as end:
                partial_batch = end.value
                self.partial_batches.append(partial_batch)
                self.running, self.until = None, lambda: True
                if partial_batch.last:
                    cut = self.finish(partial_batch.step)
                    found = random.Random(f"{self.job.salt}{cut.step}d").random()
                    newest = self.publications.newest
                    if self.job.publishing.publishes(cut.step, newest, found, starving=False):
                        self.publish(cut.step)
                    return


def model(seed, steps):
    """Runs a random job to its end, one random event after the other; returns their number."""
    draw = random.Random(seed)
    job = Job(draw)
    gathers, wanted, starving = Gathers(job.processes), [0], 0

    def raised(kind, number):
        wanted[0] = max(wanted[0], number)

    world = [Modelled(job, i, gathers, raised) for i in range(job.processes)]
    events = 0
    while any(process.admission.finished < steps for process in world):
        events += 1
        late = [p for p in world if p.admission.finished < steps]
        choices = [(p.go_on, ()) for p in late if p.until()]
        for process in world:
            newest = process.publications.newest
            held = min(newest, draw.randint(0, steps))
            if process.begun < process.admission.end(newest):
                choices.append((process.begin, (held,)))
            if process.starves():
                starving = max(starving, newest + 1)
            if process.starving < starving:
                choices.append((vars(process).update, ({"starving": starving},)))
            choices += [
                (vars(group).update, ({"done": True},))
                for group in process.groups.values()
                if not group.done
            ]
            if process.heard < wanted[0]:
                choices.append((vars(process).update, ({"heard": wanted[0]},)))
        choices += [(future.set_result, (values,)) for future, values in gathers.ready()]
        assert choices, f"seed {seed}: nothing can happen, and steps are left"
        what, given = draw.choice(choices)
        what(*given)
    for process in world:
        assert process.partial_batches == world[0].partial_batches
        assert process.published == world[0].published
    for step in range(1, steps + 1):
        assert [w.last for w in world[0].partial_batches if w.step == step][-1:] == [True]
    # a gather tells of a group or asks for weights, or nobody would have begun it
    assert all(any(map(any, values.values())) for values, _ in gathers.begun)
    return events


def test_partial_batches_of_a_model_are_the_same_and_never_wait_forever():
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


class Threaded(Modelled):
    """A process of a job of threads, with real connections."""

    def __init__(self, job, index, pair, seed):
        super().__init__(job, index, Gathers(1), lambda kind, number: None)
        self.draw = random.Random(f"{seed}{index}")
        gather = BackgroundGather(pair[0])
        peers = Peers(pair[1], index, job.processes, self.wake)
        self.source = PartialBatchSource(
            *(job.planner(), self, gather, peers),
            judges=True,
            facts=lambda group, process: job.facts(group.counter),
        )

    def wake(self):
        with self.lock:
            self.lock.notify_all()

    def drive(self, until, *, needs=0):
        while not until():
            with self.lock:
                self.begin(self.admission.finished)
                late = [group for group in self.groups.values() if not group.done]
                if late:
                    self.draw.choice(late).done = True
                self.lock.wait(self.draw.uniform(0, 0.003))

    def run(self, steps):
        while self.admission.finished < steps:
            partial_batch = self.source.next(self.drive)
            self.partial_batches.append(partial_batch)
            with self.lock:
                if partial_batch.last:
                    self.finish(partial_batch.step)
        return self.partial_batches


@pytest.mark.parametrize("seed", range(6))
def test_partial_batches_are_the_same_on_processes_with_connections(seed):
    job = Job(random.Random(seed))
    pairs = list(zip(*(exchanges(job.processes) for _ in range(2)), strict=True))

    def run(index):
        process = Threaded(job, index, pairs[index], seed)
        return process, process.run(5)

    found = together(job.processes, run)
    for process, partial_batches in found:
        assert partial_batches == found[0][1]
        process.source.close()
