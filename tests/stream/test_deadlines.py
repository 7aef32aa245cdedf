"""The rule of steps that differ in size, as a model of many processes that only share its formula.

A million random events are the nightly tier's, thirty thousand the default one's.

Nightly: the rule of steps that differ in size holds over 1,000,000 random events, kills and
restarts among them.
"""

import dataclasses
import json

import pytest

from distflow_jax.stream.deadlines import (
    Deadlines,
    begun_by_steps,
    in_order,
    observed_staleness,
)
from distflow_jax.stream.schedule import Admission, Rule
from tests.support import rule_worlds


def test_a_step_waits_for_what_later_steps_cannot_train_in_time():
    rule = Deadlines(Rule(groups=2, max_staleness=2))
    assert rule.end(0) == 4
    assert rule.awaited() == 4  # one group, whichever
    rule.complete(3)
    assert rule.awaited() is None
    assert rule.lacking == 1
    cut = rule.finish(1)
    assert (cut.kept, cut.end, cut.final) == ((3,), 0, True)
    assert list(cut.counters) == [3]
    assert not rule.untrained(3) and rule.untrained(2) and rule.untrained(9)
    assert (rule.position, rule.end(1), rule.end(0)) == (0, 5, 4)  # 4 may begin by version 1
    assert [rule.step_of(c) for c in (0, 1, 2, 4)] == [3, 3, 3, 4]
    # of 0, 1 and 2 step 3 trains two at most
    rule.complete(4)
    assert rule.awaited() == 3
    rule.complete(1)
    assert rule.finish(2).kept == (1, 4)
    # 0 and 2 have to be trained now
    rule.complete(5)
    rule.complete(2)
    assert rule.awaited() == 1
    assert not rule.cut(3).final
    with pytest.raises(ValueError, match="step 3 needs a group below prompt 1"):
        rule.finish(3)
    rule.complete(0)
    assert rule.finish(3).kept == (0, 2)  # by counter: 5 has time
    assert rule.position == 5


def test_the_end_of_a_run_leaves_nothing_untrained():
    rule = Deadlines(Rule(groups=2, max_staleness=2), steps=2)
    assert rule.end(0) == 4  # two steps of two
    rule.complete(3)
    assert rule.awaited() == 3
    rule.complete(0)
    assert rule.finish(1).kept == (0, 3)
    assert rule.end(1) == 4
    for counter in (1, 2):
        rule.complete(counter)
    assert not rule.lacking
    assert rule.finish(2).kept == (1, 2)
    assert not rule.has_step(3)


def test_the_end_of_the_data_ends_the_steps():
    rule = Deadlines(Rule(groups=2, max_staleness=1), last=3)
    assert rule.end(0) == 2
    rule.complete(1)
    rule.finish(1)
    assert rule.end(1) == 3 and rule.has_step(2)
    rule.complete(2)
    rule.complete(0)
    rule.finish(2)
    assert not rule.has_step(3)


def test_constants_and_steps_are_checked():
    with pytest.raises(ValueError, match="max_staleness of at least 1"):
        Deadlines(Rule(groups=2, max_staleness=0))
    rule = Deadlines(Rule(groups=2, max_staleness=1))
    with pytest.raises(ValueError, match="step 2 has no groups yet"):
        rule.cut(2)
    with pytest.raises(ValueError, match="prompt 2 is trained on, or may not begin yet"):
        rule.step_of(2)


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_samples_of_a_run_without_a_budget_are_young_enough(staleness):
    """Groups of steps of B each, all of them begun: each step has to train just these."""
    rule, step, counter = Rule(groups=3, max_staleness=staleness), 7, 20
    begun = begun_by_steps(rule, step, counter, range(counter, counter + (staleness + 1) * 3))
    deadlines = Deadlines(rule, step=step, counter=counter, begun=begun)
    for number in range(staleness + 1):
        first = counter + number * 3
        for c in range(first, first + 3):
            assert deadlines.awaited() is not None
            assert deadlines.step_of(c) <= step + number + 1
            deadlines.complete(c)
        assert deadlines.finish(step + number + 1).kept == (first, first + 1, first + 2)
    assert begun_by_steps(rule, step, counter, ()) == {"next": counter, "waiting": []}


def test_a_smaller_staleness_trains_what_is_too_old_first():
    begun = {"next": 9, "waiting": [[4, 3], [6, 3], [7, 4], [8, 5]]}
    assert not in_order(begun)
    assert in_order({"next": 9, "waiting": [[7, 4], [8, 5]]})
    assert in_order({"next": 9, "waiting": []})
    rule = Deadlines(Rule(groups=2, max_staleness=1), step=6, counter=4, begun=begun)
    assert rule.end(6) == 9  # more than this rule lets begin, but they have
    rule.complete(7)
    rule.complete(8)
    assert rule.awaited() == 5
    for counter in (4, 6):
        rule.complete(counter)
    assert rule.finish(7).kept == (4, 6)
    assert rule.finish(8).kept == (7, 8)


# -- the model --------------------------------------------------------------------------------


@dataclasses.dataclass
class Group:
    """A group that has begun on a process."""

    version: int  # the oldest that sampled one of its tokens
    done: bool = False
    told: bool = False


class Process:
    """A sampler, and what its process knows: the messages of gathers, each at its own time."""

    def __init__(self, admission):
        self.admission = admission
        self.groups: dict[int, Group] = {}
        self.inbox: list[list[int]] = []
        self.ended: list[tuple[int, ...]] = []  # what each step trained since the start


class World(rule_worlds.World):
    """A job whose events come in any order; kills and restarts with other processes among them."""

    kinds = ("begin", "end", "gather", "deliver")

    def __init__(self, seed):
        super().__init__(seed)
        self.hasty = self.draw.random()  # how often a step ends as soon as it may
        self.trained: list[tuple[int, ...]] = []  # counters of each finished step
        self.saved = (0, 0, None, {})
        self.restart()

    def draw_rule(self):
        """Constants of the formula."""
        return Rule(groups=self.draw.randint(1, 6), max_staleness=self.draw.randint(1, 5))

    def restart(self):
        """Starts from the newest checkpoint, with any number of processes."""
        self.step, counter, begun, groups = self.saved
        del self.trained[self.step :]
        self.processes = []
        for _ in range(self.draw.randint(1, 5)):
            admission = Deadlines(
                self.rule,
                step=self.step,
                counter=counter,
                begun=begun and json.loads(json.dumps(begun)),
                last=self.last,
                steps=self.steps,
            )
            self.processes.append(Process(admission))
        for counter, group in groups.items():
            self.owner(counter).groups[counter] = dataclasses.replace(group, told=False)

    def begin(self, process):
        """A group begins with the weights that its sampler holds: those of all finished steps."""
        admission = process.admission
        for counter in range(admission.position, admission.end(self.step)):
            mine = self.owner(counter) is process and counter not in process.groups
            if mine and admission.untrained(counter):
                process.groups[counter] = Group(self.step)
                return True
        return False

    def end(self, process):
        """A group ends, whichever it is."""
        running = [group for group in process.groups.values() if not group.done]
        if running:
            self.draw.choice(running).done = True
        return bool(running)

    def gather(self, _):
        """All processes tell their groups that have ended; the table is on its way to each."""
        news = []
        for process in self.processes:
            mine = [(c, g) for c, g in process.groups.items() if g.done and not g.told]
            self.draw.shuffle(mine)
            for counter, group in mine:
                group.told = True
                news.append(counter)
        for process in self.processes if news else []:
            process.inbox.append(news)
        return bool(news)

    def deliver(self, process):
        """A table arrives, in the order of the gathers."""
        if not process.inbox:
            return False
        for counter in process.inbox.pop(0):
            process.admission.complete(counter)
        return True

    def train(self):
        """All processes train a step, once all know the same and the groups that it needs."""
        if any(process.inbox for process in self.processes):
            return False
        ready = {process.admission.awaited() is None for process in self.processes}
        assert len(ready) == 1, "processes disagree"
        if not ready.pop():
            return False
        lacking = {process.admission.lacking for process in self.processes}
        assert len(lacking) == 1, "processes disagree"
        if lacking.pop() and self.draw.random() >= self.hasty:
            return False  # the budget of the rollout is not spent
        self.step += 1
        cuts = {process.admission.finish(self.step) for process in self.processes}
        assert len(cuts) == 1, "processes train other groups"
        (cut,) = cuts
        assert 1 <= len(cut.kept) <= self.rule.groups
        assert list(cut.kept) == sorted(cut.kept)
        for counter in cut.kept:
            group = self.owner(counter).groups.pop(counter)
            assert group.done
            assert self.step - 1 - group.version <= self.rule.max_staleness, "too old"
        self.trained.append(cut.kept)
        self.check_once()
        if self.draw.random() < 0.3:
            first = self.processes[0].admission
            groups = {c: g for p in self.processes for c, g in p.groups.items()}
            # samples that a checkpoint lacks are sampled again, by newer weights
            kept = {
                c: dataclasses.replace(g) for c, g in groups.items() if self.draw.random() < 0.9
            }
            self.saved = (self.step, first.position, first.begun, kept)
        return True

    def check_once(self):
        """Every counter below the first that is not trained on was trained once, none twice."""
        counters = [c for kept in self.trained for c in kept]
        assert len(counters) == len(set(counters))
        position = self.processes[0].admission.position
        assert set(range(position)) <= set(counters)
        untrained = [c for c in range(max(counters) + 1) if c not in set(counters)]
        assert all(self.processes[0].admission.untrained(c) for c in untrained)

    def check(self):
        """No more groups are under way than steps have room for, and none of them far ahead."""
        limit = self.rule.max_staleness * self.rule.groups
        assert sum(len(p.groups) for p in self.processes) <= limit
        admission = self.processes[0].admission
        ahead = admission.end(self.step) - admission.position
        assert ahead <= observed_staleness(self.rule) * self.rule.groups

    def check_end(self):
        """Nothing has begun that no step trained, and no group of the data is left."""
        assert not any(process.groups for process in self.processes)
        assert self.steps is None or self.step == self.steps
        counters = sorted(c for kept in self.trained for c in kept)
        assert counters == list(range(len(counters)))
        if self.last is not None:
            assert len(counters) == self.last


@pytest.mark.parametrize("count", [30_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_no_event_loses_doubles_or_ages_a_group(count):
    rule_worlds.play(World, count)


def test_steps_of_b_groups_each_are_those_of_the_other_rule():
    """With a budget that all that may begin just fills, one group after the other ends."""
    rule = Rule(groups=4, max_staleness=1)
    deadlines, staleness = Deadlines(rule), Admission(rule)
    for step in range(1, 20):
        for counter in range(deadlines.position, deadlines.end(step - 1)):
            deadlines.complete(counter)
        assert deadlines.finish(step).kept == staleness.finish(step).kept
