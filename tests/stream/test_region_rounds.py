"""Filter decisions of a region reach all processes round by round, whatever is late."""

import random
import threading
import time
import types

import pytest
from support.gathers import exchanges, together

from distflow_jax.cluster.background_gather import BackgroundGather
from distflow_jax.stream.exact_order import ExactOrder
from distflow_jax.stream.region_rounds import RegionRounds
from distflow_jax.stream.schedule import Admission, Rule

STEPS = 6


class Process:
    """The groups of one process of several: those of every `count`-th prompt. No arrays."""

    def __init__(self, index, exchange, count, seed):
        self.index, self.count, self.lock = index, count, threading.Condition()
        self.admission = Admission(Rule(4, 1, 3), steps=STEPS, judged=True, exact=True)
        self.groups, self.begun, self.cuts = {}, [], []
        self.draw = random.Random(seed * count + index)
        self.wake = lambda: None
        self.rounds = rounds = RegionRounds(self, BackgroundGather(exchange))
        self.gather = rounds._gather
        self.order = ExactOrder(self.admission, held=0, known=rounds.known, due=lambda v: False)

    def run(self):
        start, newest = 0, 0
        while self.admission.finished < STEPS:
            time.sleep(self.draw.uniform(0, 0.004))
            with self.lock:
                if work := self.order.next(newest):
                    end = self.admission.cut(work.step).end
                    self.begun.append((work.step, work.version, start, end))
                    self.begin(start, end)
                    start = end
                newest = self.go_on(newest)
        return self.begun, self.cuts

    def begin(self, start, end):
        """Begins this process's groups of a round."""
        for counter in range(start, end):
            if counter % self.count == self.index:
                keep = counter * 7 % 5 > 1
                self.groups[counter] = types.SimpleNamespace(counter=counter, keep=keep, done=False)

    def go_on(self, newest):
        """Ends a group, and a step that can end; returns the newest version."""
        late = [group for group in self.groups.values() if not group.done]
        if late:
            self.draw.choice(late).done = True
        step = self.admission.finished + 1
        if self.admission.cut(step).final and self.draw.random() < 0.3:
            self.cuts.append(self.admission.finish(step))
            return step
        return newest


class Leasing(Process):
    """One whose workers sample: groups begin as they may, and rounds are told beside that."""

    def run(self):
        start, newest = 0, 0
        while self.admission.finished < STEPS:
            time.sleep(self.draw.uniform(0, 0.004))
            with self.lock:
                end = max(start, self.admission.end(newest))
                for counter in range(start, end):
                    step = self.admission.step_of(counter)
                    self.begun.append((step, max(0, step - 2), counter, counter + 1))
                self.begin(start, end)
                start = end
                self.rounds.known(end)
                newest = self.go_on(newest)
        return self.begun, self.cuts


@pytest.mark.parametrize("kind", [Process, Leasing])
@pytest.mark.parametrize("count", [1, 3])
def test_rounds_are_the_same_on_all_processes_and_at_any_time(count, kind):
    found = []
    for seed in range(4):
        ends = exchanges(count)

        def begin(i, seed=seed, ends=ends):
            return kind(i, ends[i] if count > 1 else None, count, seed)

        members = together(count, begin)
        found += together(count, lambda i, members=members: members[i].run())
        for member, exchange in zip(members, ends, strict=True):
            member.gather.close()
            exchange.close()
    assert all(run == found[0] for run in found)
    begun, cuts = found[0]
    assert len(begun) > STEPS  # some steps have several rounds
    assert [step for step, *_ in begun] == sorted(step for step, *_ in begun)
    for step, version, start, end in begun:
        assert version == max(0, step - 2)
        assert cuts[step - 1].start <= start < end <= cuts[step - 1].end
