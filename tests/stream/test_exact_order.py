"""The order of samplers with weight updates at boundaries depends on no timing, and never waits for
ever."""

import random

import pytest

from distflow_jax.stream.exact_order import ExactOrder
from distflow_jax.stream.schedule import Admission, Rule


class Process:
    """A sampler and a trainer that take turns in any order, without arrays."""

    def __init__(self, rule, steps, *, judged, last, held=0, due=lambda version: False, seed=0):
        self.admission = Admission(rule, step=held, counter=held * rule.groups, last=last,
                                   steps=steps, judged=judged)  # fmt: skip
        self.draw, self.judged, self.steps, self.due = random.Random(seed), judged, steps, due
        self.kept = random.Random(1)
        self.decision = [self.kept.random() < 0.6 for _ in range(10_000)]
        self.known_to = self.begun = self.admission.position
        self.newest, self.held, self.first = held, held, held
        self.order = ExactOrder(self.admission, held=held, known=self.known, due=due)
        self.done = []  # ("begin", step, version, first counter, last one) or ("evaluate", version)

    def known(self, end):
        """Filter decisions of a round come late, all at once."""
        if self.judged and self.known_to < end:
            if self.draw.random() < 0.5:
                return False
            for counter in range(self.known_to, end):
                self.admission.judge(counter, self.decision[counter])
            self.known_to = end
        return True

    def sample(self):
        work = self.order.next(self.newest)
        if work is None:
            return
        assert self.held <= work.version <= self.newest
        self.held = work.version
        if work.step is None:
            self.done.append(("evaluate", work.version))
            return
        end = min(self.admission.end(self.held), self.admission.cut(work.step).end)
        assert end > self.begun
        self.done.append(("begin", work.step, work.version, self.begun, end))
        self.begun = end

    def train(self):
        step = self.admission.finished + 1
        if self.admission.has_step(step):
            cut = self.admission.cut(step)
            if cut.final and cut.end <= self.begun:
                self.admission.finish(step)
                self.newest = step

    def run(self):
        for _ in range(20_000):
            self.draw.choice((self.sample, self.train))()
            if self.ended():
                return self.done
        raise AssertionError(f"nothing more happens: {self.done[-4:]}")

    def ended(self):
        left = [v for v in range(self.first, self.newest + 1) if self.due(v)]
        made = [entry[1] for entry in self.done if entry[0] == "evaluate"]
        return not self.admission.has_step(self.admission.finished + 1) and made == left


def due(version):
    return version % 3 == 0


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("last", [None, 50])
@pytest.mark.parametrize("held", [0, 4])
def test_work_is_the_same_whatever_is_late(judged, staleness, last, held):
    rule, steps = Rule(5, staleness, 3 if judged else 1), 12
    runs = [
        Process(rule, steps, judged=judged, last=last, held=held, due=due, seed=seed).run()
        for seed in range(30)
    ]
    assert all(done == runs[0] for done in runs)
    begun = [entry for entry in runs[0] if entry[0] == "begin"]
    assert all(v == max(held, step - 1 - staleness) for _, step, v, _, _ in begun)
    assert [entry[3] for entry in begun[1:]] == [entry[4] for entry in begun[:-1]]  # no gap
    rounds = max(sum(entry[1] == step for entry in begun) for step in range(steps + 1))
    assert (rounds > 1) == judged
    for place, entry in enumerate(runs[0]):
        if entry[0] == "evaluate":  # before the groups of the step that this version answers
            later = [other for other in runs[0][place:] if other[0] == "begin"]
            earlier = [other for other in runs[0][:place] if other[0] == "begin"]
            assert all(other[1] >= entry[1] + 1 + staleness for other in later)
            assert all(other[1] < entry[1] + 1 + staleness for other in earlier)


def test_a_region_begins_no_group_of_a_step_that_may_not_take_it():
    """Groups that a step begins are all its own: what it looks at in the end."""
    process = Process(Rule(5, 2, 4), 10, judged=True, last=None, seed=3)
    ends = {}
    finish = process.admission.finish
    process.admission.finish = lambda step: ends.setdefault(step, finish(step))
    for _, step, _, first, end in [e for e in process.run() if e[0] == "begin"]:
        assert ends[step].start <= first < end <= ends[step].end


def test_a_run_that_ends_has_no_work_of_newer_weights():
    """Work of older ones goes on: the groups that a checkpoint waits for."""
    process = Process(Rule(5, 2), 12, judged=False, last=None, due=lambda version: True)
    while process.admission.finished < 3:
        process.draw.choice((process.sample, process.train))()
    process.order.end_with(2)
    for _ in range(200):
        process.sample()
    assert process.order.next(process.newest) is None
    begun = [entry[1:3] for entry in process.done if entry[0] == "begin"]
    assert begun[-1] == (5, 2) and ("evaluate", 2) == process.done[-2]
