"""Ends of rollouts on several processes: the same groups on all of them, and none waits forever.

A model has every order of events: a million of them are the nightly tier's, twenty thousand the
default one's. Processes with real connections run the same code.
"""

import random
import threading
import types

import pytest
from support.gathers import Gathers, dealt, exchanges, together

from distflow_jax.environments.episode_sampler import Counts
from distflow_jax.parallel.background_gather import BackgroundGather
from distflow_jax.parallel.peers import Peers
from distflow_jax.stream.batches.rollout_budget import RolloutBudget
from distflow_jax.stream.batches.rollout_taker import rollout_metrics
from distflow_jax.stream.deadlines import Deadlines
from distflow_jax.stream.schedule import Rule


class Job:
    """The constants of a random job."""

    def __init__(self, draw, steps):
        # each process has a group of every batch, as the loader's deal says
        self.processes = draw.randint(1, 4)
        self.rule = Rule(max(draw.randint(1, 6), self.processes), draw.randint(1, 3))
        self.steps = steps
        self.longest = draw.randint(1, 8)
        self.tokens = draw.choice([1, 5, 20, 1000])
        self.salt = draw.random()

    def buffer(self, counter):
        return dealt(counter, self.rule.groups, self.processes, self.salt)

    def length(self, counter):
        """Tokens of a group."""
        return random.Random(f"{self.salt}{counter}x").randint(1, self.longest)

    def rule_of_a_process(self):
        return Deadlines(self.rule, steps=self.steps)


class Process:
    """A process of a model: what a RolloutBudget uses of a producer, and the training."""

    def __init__(self, job, index, make_parts):
        """`make_parts()`: the gather and the peers, which may call `wake` at once."""
        self.job, self.index, self.lock = job, index, threading.Condition()
        self.admission = job.rule_of_a_process()
        self.groups, self.tokens, self.seen = {}, 0, set()
        self.steps, self.sampled = [], []
        self.budget = RolloutBudget(*(self, self.admission, *make_parts()), tokens=job.tokens)

    def counts(self):
        return Counts(tokens=self.tokens)

    def admit(self):
        """Begins what the rule allows."""
        for counter in range(self.admission.position, self.admission.end(self.admission.finished)):
            if self.job.buffer(counter) == self.index and counter not in self.seen:
                self.seen.add(counter)
                self.groups[counter] = types.SimpleNamespace(
                    counter=counter, done=False, left=self.job.length(counter)
                )

    def sample(self, draw):
        """A token of a group, or the end of its rewards; whether there was anything to do."""
        late = [group for group in self.groups.values() if not group.done]
        if not late:
            return False
        group = draw.choice(late)
        if group.left:
            group.left, self.tokens = group.left - 1, self.tokens + 1
        else:
            group.done = True
        return True

    def train(self, cut):
        """A step with the groups that the end of its rollout gave."""
        self.steps.append(cut)
        self.sampled.append(self.budget.sampled())
        assert self.admission.finish(cut.step) == cut
        for counter in cut.kept:
            self.groups.pop(counter, None)

    def check(self):
        """After the last step nothing is left."""
        assert not self.groups
        assert sum(self.sampled) == self.tokens == sum(map(self.job.length, self.seen))


class Modelled(Process):
    """A process whose gathers and numbers are events."""

    def __init__(self, job, index, gathers, raised):
        self.heard = 0
        peers = types.SimpleNamespace(
            raise_to=raised,
            seen=lambda kind: self.heard,
            check=lambda: None,
            index=index,
            count=job.processes,
        )
        super().__init__(job, index, lambda: (gathers.of(index), peers))
        self.running, self.until = None, lambda: True

    def go_on(self):
        """Goes on until it waits; at the end of a rollout it trains."""
        while self.until():
            if self.running is None:
                self.admit()
                self.running = self.budget.waits()
            try:
                self.until, _ = next(self.running)
            except StopIteration as end:
                self.running, self.until = None, lambda: True
                self.train(end.value)
                return


def check_ends(world, job):
    """All processes trained the same, and rollouts have ended no earlier than they may."""
    for process in world:
        assert process.steps == world[0].steps
        process.check()
    assert len(world[0].steps) == job.steps
    counters = sorted(c for cut in world[0].steps for c in cut.kept)
    assert counters == list(range(len(counters)))
    rule, sampled, trained = job.rule_of_a_process(), 0, 0
    for number, cut in enumerate(world[0].steps):
        found = [{"tokens": p.sampled[number], "groups": len(cut.kept)} for p in world]
        metrics = rollout_metrics(found, budget=job.tokens)
        tokens, beyond = (metrics[f"training/rollout_tokens{end}"] for end in ("", "_beyond"))
        assert beyond == max(0, tokens - job.tokens)
        sampled += tokens
        if tokens < job.tokens and len(cut.kept) < job.rule.groups:  # nothing was left to sample
            waiting = [counter for counter, _ in rule.begun["waiting"]]
            assert sampled == trained + sum(map(job.length, waiting))
        trained += sum(map(job.length, cut.kept))
        for counter in cut.kept:
            rule.complete(counter)
        assert rule.finish(cut.step).kept == cut.kept


def model(seed, steps):
    """Runs a random job to its end, one random event after the other; returns their number."""
    draw = random.Random(seed)
    job = Job(draw, steps)
    gathers, wanted = Gathers(job.processes), [0]

    def raised(kind, number):
        wanted[0] = max(wanted[0], number)

    world = [Modelled(job, i, gathers, raised) for i in range(job.processes)]
    events = 0
    while any(process.admission.finished < steps for process in world):
        events += 1
        late = [p for p in world if p.admission.finished < steps]
        choices = [(p.go_on, ()) for p in late if p.until()]
        choices += [
            (p.sample, (draw,)) for p in world if any(not g.done for g in p.groups.values())
        ]
        choices += [(vars(p).update, ({"heard": wanted[0]},)) for p in world if p.heard < wanted[0]]
        choices += [(future.set_result, (values,)) for future, values in gathers.ready()]
        assert choices, f"seed {seed}: nothing can happen, and steps are left"
        what, given = draw.choice(choices)
        what(*given)
    check_ends(world, job)
    # a gather tells something, or nobody would have begun it
    assert all(any(t or c for t, c in values.values()) for values, _ in gathers.begun)
    return events


def test_rollouts_of_a_model_end_alike_and_never_wait_forever():
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
        super().__init__(
            *(job, index),
            lambda: (
                BackgroundGather(pair[0]),
                Peers(pair[1], index, job.processes, self.wake),
            ),
        )

    def wake(self):
        with self.lock:
            self.lock.notify_all()

    def drive(self, until, *, needs=0):
        while not until():
            with self.lock:
                if not self.sample(self.draw) or self.draw.random() < 0.1:
                    self.lock.wait(self.draw.uniform(0, 0.003))

    def run(self):
        for _ in range(self.job.steps):
            self.admit()
            self.train(self.budget.end(self.drive))


@pytest.mark.parametrize("seed", range(6))
def test_rollouts_end_alike_on_processes_with_connections(seed):
    job = Job(random.Random(seed), 5)
    pairs = list(zip(*(exchanges(job.processes) for _ in range(2)), strict=True))

    def run(index):
        process = Threaded(job, index, pairs[index], seed)
        process.run()
        return process

    world = together(job.processes, run)
    check_ends(world, job)
    for process in world:
        process.budget.close()


def test_metrics_of_a_rollout():
    found = [{"tokens": 30, "groups": 3}, {"tokens": 12, "groups": 3}]
    assert rollout_metrics(found, budget=40) == {
        "training/rollout_tokens": 42.0,
        "training/rollout_tokens_beyond": 2.0,
        "training/groups": 3.0,
    }
    assert rollout_metrics(found, budget=50)["training/rollout_tokens_beyond"] == 0
