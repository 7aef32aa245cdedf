"""The rule of asynchronous steps, as a model of many processes that only share its formula.

A million random events are the nightly tier's, fifty thousand the default one's.

Nightly: the rule of asynchronous steps holds over 1,000,000 random events, kills and restarts among
them.
"""

import dataclasses
import random

import pytest

from distflow_jax.stream.schedule import Admission, Rule
from tests.support import rule_worlds


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_groups_belong_to_steps_by_their_counter_alone(staleness):
    rule = Rule(groups=4, max_staleness=staleness)
    admission = Admission(rule)
    for counter in range(40):
        assert admission.step_of(counter) == counter // 4 + 1
    for held in range(5):
        assert admission.end(held) == 4 * (held + 1 + staleness)
        assert rule.newest_step(held) == held + 1 + staleness
    for step in range(1, 9):
        assert rule.exact_version(step) == max(0, step - 1 - staleness)


def test_decisions_cut_the_counters_into_steps():
    admission = Admission(Rule(groups=2, max_staleness=1, max_rounds=2), judged=True)
    assert admission.cut(1).kept == (0, 1)
    assert not admission.cut(1).final
    admission.judge(0, False)
    assert admission.cut(1).kept == (1, 2)
    assert admission.step_of(3) == 2
    admission.judge(1, True)
    admission.judge(2, False)
    assert admission.step_of(3) == 1
    admission.judge(3, False)  # four were looked at: 2 x 2, and the step goes on with one
    cut = admission.finish(1)
    assert (cut.start, cut.end, cut.kept, cut.final) == (0, 4, (1,), True)
    assert admission.cut(2).start == 4


def test_the_end_of_the_data_ends_a_step():
    admission = Admission(Rule(groups=2, max_staleness=5, max_rounds=9), last=3, judged=True)
    for counter in range(3):
        admission.judge(counter, counter == 0)
    cut = admission.finish(1)
    assert (cut.end, cut.kept) == (3, (0,))
    assert admission.cut(2).kept == ()
    with pytest.raises(ValueError, match="beyond the end of the data, 3"):
        admission.step_of(3)


@pytest.mark.parametrize("name", ["groups", "max_rounds"])
def test_constants_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Rule(**{"groups": 1, "max_staleness": 0} | {name: 0})


def test_a_step_that_is_not_decided_does_not_end():
    admission = Admission(Rule(groups=1, max_staleness=0), judged=True)
    with pytest.raises(ValueError, match="step 1 cannot end after 0 finished ones"):
        admission.finish(1)
    admission.judge(0, True)
    with pytest.raises(ValueError, match="judged twice, and differently"):
        admission.judge(0, False)
    with pytest.raises(ValueError, match="step 2 cannot end"):
        admission.finish(2)
    admission.finish(1)
    with pytest.raises(ValueError, match="step 1 is finished"):
        admission.cut(1)


# -- the model --------------------------------------------------------------------------------


@dataclasses.dataclass
class Group:
    """A group that has begun."""

    version: int  # the oldest that sampled one of its tokens
    done: bool = False
    keep: bool = True


class Process:
    """A sampler, and what its process knows."""

    def __init__(self, admission, held):
        self.admission, self.held = admission, held
        self.groups: dict[int, Group] = {}
        self.inbox: list[tuple[int, bool]] = []


@dataclasses.dataclass
class Checkpoint:
    """Finished steps, the place in the data, and all finished groups beyond it, as at one moment.

    A group that were left out could be judged differently when it is sampled again, and others that
    began by its filter decision would belong to later steps.
    """

    step: int = 0
    counter: int = 0
    groups: dict[int, Group] = dataclasses.field(default_factory=dict)


class World(rule_worlds.World):
    """A job whose events come in any order; kills and restarts with other processes among them."""

    kinds = ("begin", "end", "deliver", "publish")

    def __init__(self, seed):
        super().__init__(seed)
        self.share = self.draw.choice([0.2, 0.5, 0.9])  # of groups that are kept
        self.history: list[tuple[int, int]] = []  # counters of each finished step
        self.saved = Checkpoint()
        self.restart()

    def draw_rule(self):
        """Constants of the formula, and whether groups are judged by it."""
        draw = self.draw
        self.judged = draw.random() < 0.5
        rounds = draw.randint(1, 3) if self.judged else 1
        return Rule(groups=draw.randint(1, 6), max_staleness=draw.randint(0, 4), max_rounds=rounds)

    def restart(self):
        """Starts from the newest checkpoint, with any number of processes."""
        saved = self.saved
        self.step = saved.step
        del self.history[saved.step :]
        self.processes = []
        for _ in range(self.draw.randint(1, 5)):
            admission = Admission(
                self.rule,
                step=saved.step,
                counter=saved.counter,
                last=self.last,
                steps=self.steps,
                judged=self.judged,
            )
            self.processes.append(Process(admission, saved.step))
        for counter, group in saved.groups.items():  # every process reads all filter decisions
            self.owner(counter).groups[counter] = dataclasses.replace(group)
            if self.judged:
                for process in self.processes:
                    process.admission.judge(counter, group.keep)

    def next_counter(self, process):
        """The first counter of a process that may begin and has not."""
        admission = process.admission
        for counter in range(admission.position, admission.end(process.held)):
            if self.owner(counter) is process and counter not in process.groups:
                return counter
        return None

    def begin(self, process):
        """A group begins with the weights that its sampler holds."""
        counter = self.next_counter(process)
        if counter is not None:
            assert counter < process.admission.end(process.held)
            process.groups[counter] = Group(process.held)
        return counter is not None

    def end(self, process):
        """A group ends, whichever it is; its filter decision is on its way to the others."""
        running = [item for item in process.groups.items() if not item[1].done]
        if running:
            counter, group = self.draw.choice(running)
            group.done = True
            if self.judged:
                group.keep = self.draw.random() < self.share
                for other in self.processes:
                    other.inbox.append((counter, group.keep))
        return bool(running)

    def deliver(self, process):
        """A filter decision arrives, in any order."""
        if not process.inbox:
            return False
        at = self.draw.randrange(len(process.inbox))
        process.admission.judge(*process.inbox.pop(at))
        return True

    def publish(self, process):
        """A sampler takes newer weights, not necessarily the newest, between two tokens."""
        if process.held == self.step:
            return False
        process.held = self.draw.randint(process.held + 1, self.step)
        return True

    def ready(self, process):
        """Whether a process can take part in the next step, by what it knows itself."""
        cut = process.admission.cut(self.step + 1)
        mine = [c for c in range(cut.start, cut.end) if self.owner(c) is process]
        return cut.final and all(c in process.groups and process.groups[c].done for c in mine)

    def train(self):
        """All processes train a step, if all can."""
        if not all(map(self.ready, self.processes)):
            return False
        self.step += 1
        cuts = {process.admission.finish(self.step) for process in self.processes}
        assert len(cuts) == 1, "processes train other groups"
        (cut,) = cuts
        assert cut.start == (self.history[-1][1] if self.history else 0), "lost, or twice"
        assert len(cut.kept) <= self.rule.groups
        if not self.judged:
            end = cut.start + self.rule.groups
            assert cut.kept == tuple(range(cut.start, min(end, self.last or end)))
        for counter in range(cut.start, cut.end):
            group = self.owner(counter).groups.pop(counter)
            assert group.keep == (counter in cut.kept)
            assert self.step - 1 - group.version <= self.rule.max_staleness, "too old"
        self.history.append((cut.start, cut.end))
        if self.draw.random() < 0.3:
            done = {
                counter: group
                for process in self.processes
                for counter, group in process.groups.items()
                if group.done
            }
            # all that are finished, or none
            self.saved = Checkpoint(self.step, cut.end, self.draw.choice([done, {}]))
        return True

    def check(self):
        """At most (max_staleness + 1) B groups are sampled, waiting or finished, and worth
        training."""
        alive = sum(
            not group.done or group.keep for p in self.processes for group in p.groups.values()
        )
        assert alive <= (self.rule.max_staleness + 1) * self.rule.groups

    def check_end(self):
        """Nothing was begun that no step trains or looks at, and no group of the data is left."""
        assert not any(process.groups for process in self.processes)
        assert self.steps is None or self.step == self.steps
        if self.last is not None:
            assert self.history[-1][1] == self.last
        assert [start for start, _ in self.history[1:]] == [end for _, end in self.history[:-1]]


@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_no_event_loses_doubles_splits_or_ages_a_group(count):
    rule_worlds.play(World, count)


def test_with_exact_versions_a_group_that_begins_stays_in_its_step():
    """Filter decisions come in any order, and steps of which some are missing hold up later
    ones."""
    for seed in range(300):
        draw = random.Random(seed)
        rule = Rule(draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 3))
        admission, begun, late = Admission(rule, judged=True, exact=True), {}, []
        while admission.finished < 8:
            for counter in range(len(begun), admission.end(admission.finished)):
                begun[counter] = admission.step_of(counter)
                late.append(counter)
            if late and draw.random() < 0.8:
                admission.judge(late.pop(draw.randrange(len(late))), draw.random() < 0.5)
            elif admission.cut(admission.finished + 1).final:
                cut = admission.finish(admission.finished + 1)
                assert {begun[counter] for counter in cut.counters} == {cut.step}
