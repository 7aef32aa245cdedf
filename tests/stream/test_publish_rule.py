"""Publishing by divergence: fewer weights move, no token is too old, nothing waits for ever."""

import math
import random
import types

import numpy as np
import pytest

from distflow_jax.cluster.peers import Peers
from distflow_jax.stream.publications import Publications, PublishRule, divergence_of, divergences
from distflow_jax.stream.schedule import Admission, Rule

BATCH = 6


def test_divergence_by_age_is_read_from_a_steps_metrics():
    metrics = {
        "rollout_corr/k3_kl": 9.0,
        "rollout_corr/k3_kl/0": np.float32(0.25),
        "rollout_corr/k3_kl/12": 0.5,
        "rollout_corr/kl/1": 9.0,
        "second/rollout_corr/k3_kl/12": 0.75,
    }
    assert divergences(metrics) == {0: 0.25, 12: 0.75}
    assert math.isnan(divergences({"rollout_corr/k3_kl/1": math.nan})[1])


def test_ages_that_no_token_has_count_as_the_next_older_one():
    by_age = {1: 0.1, 4: 0.4}
    assert [divergence_of(by_age, age) for age in range(6)] == [0.1, 0.1, 0.4, 0.4, 0.4, None]


@pytest.mark.parametrize(
    "published, divergence, starving, want",
    [
        (8, 0.1, False, False),
        (8, 0.11, False, True),
        (8, 0.0, True, True),
        (8, None, False, True),
        (8, math.nan, False, True),
        (6, 0.0, False, False),
        (5, 0.0, False, True),  # no group of step 10 may begin by version 5
    ],
)
def test_the_rule(published, divergence, starving, want):
    rule = PublishRule(threshold=0.1, max_staleness=3)
    assert rule.publishes(9, published, divergence, starving=starving) == want
    assert PublishRule(0.0, 3).publishes(9, published, divergence, starving=starving)


def offers_of(threshold, metrics, *, steps=9, due=()):
    """Versions that a process alone publishes, offered one after the other; and what it tells."""
    published, told, starving = [], [], types.SimpleNamespace(newest=-1)
    admission = Admission(Rule(BATCH, max_staleness=4), steps=steps)
    producer = types.SimpleNamespace(version=0, admission=admission, lock=_NoLock())
    peers = types.SimpleNamespace(seen=lambda kind: starving.newest + 1)
    publications = Publications(PublishRule(threshold, 4), producer, peers, published.append)
    for step in range(1, steps + 1):
        admission.finish(step)
        told.append(publications.offer(step, metrics(step), needed=step in due))
        assert publications.passed_over(step) == (step not in published)
    return published, told, publications, starving


class _NoLock:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_a_process_alone():
    """D grows by 1 for each step of age: the threshold is crossed at age 3, after four steps."""

    def metrics(step):
        return {f"rollout_corr/k3_kl/{age}": float(age) for age in range(5)}

    published, told, *_ = offers_of(2.5, metrics)
    assert published == [4, 8]
    assert [one["training/off_policy/divergence"] for one in told[:5]] == [0, 1, 2, 3, 0]
    assert [one["perf/weight_update/skipped"] for one in told] == [1, 1, 1, 0, 1, 1, 1, 0, 1]
    # without a threshold all versions are published, and nothing is told
    published, told, *_ = offers_of(0.0, metrics)
    assert published == list(range(1, 10)) and not any(told)
    # an evaluation needs its version; the last one is nobody's
    assert offers_of(99.0, metrics, due=(3, 9))[0] == [3, 8, 9]
    # nothing is known of the tokens
    assert offers_of(99.0, lambda step: {})[0] == list(range(1, 9))


def test_a_sampler_that_starves_brings_a_publication_forward():
    _, _, publications, starving = offers_of(99.0, lambda step: {"rollout_corr/k3_kl/4": 0.0})
    newest = publications.newest
    assert newest < 9 and not publications.asked_for(9)
    starving.newest = newest - 1  # it has taken newer ones since
    assert not publications.asked_for(9)
    starving.newest = newest
    assert publications.asked_for(9)
    publications.agree(9, [False, True])
    assert publications.newest == 9 and not publications.asked_for(9)


def test_a_sampler_that_is_idle_wants_what_newer_weights_may_begin():
    producer = types.SimpleNamespace(version=0, starving=False)
    published = []
    rule, peers = PublishRule(99.0, 4), Peers(None, 0, 1, lambda: None)
    publications = Publications(rule, producer, peers, published.append)
    publications.note_idle()  # the run has no group for newer weights
    assert not publications.asked_for(1)
    producer.starving = True
    publications.note_idle()
    assert publications.asked_for(1) and not publications.asked_for(0)
    peers.close()
    # where all versions are published there is nobody to tell
    rule, peers = PublishRule(0.0, 4), Peers(None, 0, 1, lambda: None)
    publications = Publications(rule, producer, peers, published.append)
    publications.note_idle()
    peers.close()
    assert not publications.asked_for(1) and not published


# -- a model --------------------------------------------------------------------------------------


class Modelled:
    """Samplers and trainers of a job without arrays; trainers go from step to step together."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.rule = Rule(BATCH, max_staleness=self.draw.randint(1, 4))
        self.steps, self.count = 12, self.draw.randint(1, 3)
        self.admission = Admission(self.rule, steps=self.steps)
        self.publishing = PublishRule(
            self.draw.choice([0.5, 1.0, math.inf]), self.rule.max_staleness
        )
        self.newest, self.held = 0, [0] * self.count
        self.begun = [0] * self.count  # counters below have begun, where they are the sampler's
        self.under_way, self.done = {}, {}  # counter -> version that it began with
        self.starving = -1  # version of which the trainers have heard
        self.published = 0

    def mine(self, index, end):
        return [c for c in range(self.begun[index], end) if c % self.count == index]

    def publish(self):
        self.newest = self.admission.finished
        self.published += 1

    def take(self, index):
        self.held[index] = self.newest

    def begin(self, index):
        end = self.admission.end(self.held[index])
        self.under_way |= dict.fromkeys(self.mine(index, end), self.held[index])
        self.begun[index] = end

    def end_one(self):
        counter = self.draw.choice(sorted(self.under_way))
        self.done[counter] = self.under_way.pop(counter)

    def hear(self, index):
        self.starving = max(self.starving, self.held[index])

    def train(self):
        cut = self.admission.finish(self.admission.finished + 1)
        ages = [cut.step - 1 - self.done.pop(c) for c in range(cut.start, cut.end)]
        assert 0 <= min(ages) and max(ages) <= self.rule.max_staleness
        starving = self.starving >= self.newest
        found = self.draw.choice([None, 0.1, 0.7, 2.0])
        if self.publishing.publishes(cut.step, self.newest, found, starving=starving):
            self.publish()

    def choices(self):
        finished, found = self.admission.finished, []
        ends = (finished + 1) * BATCH
        if all(c in self.done for c in range(finished * BATCH, ends)):
            found.append((self.train, ()))
        elif self.starving >= self.newest < finished:
            found.append((self.publish, ()))  # while they wait
        if self.under_way:
            found.append((self.end_one, ()))
        for index, held in enumerate(self.held):
            idle = not any(c % self.count == index for c in self.under_way)
            ahead = self.mine(index, self.admission.end(held))
            if held < self.newest:
                found.append((self.take, (index,)))
            elif ahead:
                found.append((self.begin, (index,)))
            elif idle and self.starving < held and self._more(held):
                found.append((self.hear, (index,)))
        return found

    def _more(self, held):
        newest = max(self.rule.newest_step(held), self.admission.finished)
        return self.admission.has_step(newest + 1)


def test_nothing_waits_for_ever_and_no_token_is_too_old():
    published = steps = 0
    for seed in range(200):
        world = Modelled(seed)
        while world.admission.finished < world.steps:
            choices = world.choices()
            assert choices, f"seed {seed}: nothing can happen after {world.admission.finished}"
            what, given = world.draw.choice(choices)
            what(*given)
        published += world.published
        steps += world.steps
    assert published < steps
