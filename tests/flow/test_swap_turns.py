"""Staggered swaps: one class of samplers pauses at a time, and none waits for ever for another.

A model has every order of events; threads with real connections run the product's own code.
"""

import concurrent.futures
import contextlib
import random
import threading
import time
import types

import pytest
from support.waiting import until

from distflow_jax.environments.episode_sampler import Counts
from distflow_jax.flow.lag_rule import Admission, Rule
from distflow_jax.flow.publishing.in_flight_swaps import InFlightSwaps
from distflow_jax.flow.publishing.sampler_news import SamplerNews
from distflow_jax.flow.publishing.swap_turns import (
    FIRST_SECONDS,
    TIMES,
    SwapTurns,
    takes_now,
)
from distflow_jax.flow.sampling_thread import SamplingThread
from distflow_jax.parallel.host_exchange import HostExchange, listen
from distflow_jax.parallel.peers import Peers


def test_turns_begin_with_another_class_at_each_version():
    """Four samplers in two classes: 0 and 2, then 1 and 3; of version 5 the other way round."""
    turns = [SwapTurns(index, 4, 2) for index in range(4)]
    taken = [3] * 4
    for one in turns:
        one.publish(4)
    assert [one.mine(taken, 0.0) for one in turns] == [True, False, True, False]
    taken[0] = 4  # the other one of its class has not
    assert [one.mine(taken, 0.0) for one in turns] == [False, False, True, False]
    taken[2] = 4
    assert [one.mine(taken, 0.0) for one in turns] == [False, True, False, True]
    for one in turns:
        one.publish(5)
    # the second class takes version 5 at once, and its turn in the next round is over then
    taken[1] = taken[3] = 5
    assert [one.mine(taken, 0.0) for one in turns] == [True, False, True, False]
    taken[0] = taken[2] = 5
    assert not any(one.mine(taken, 0.0) for one in turns)


def test_a_class_that_is_late_is_passed_over_until_it_says_something():
    turns = SwapTurns(1, 2, 2)
    turns.publish(2)
    assert not turns.mine([1, 1], 10.0)
    assert not turns.mine([1, 1], 10.0 + FIRST_SECONDS)
    assert turns.mine([1, 1], 10.1 + FIRST_SECONDS)
    turns.took(0.5, 100.0)
    turns.publish(4)
    assert turns.mine([1, 2], 101.0)  # not waited for again
    turns.took(0.5, 101.5)
    turns.publish(6)
    assert not turns.mine([2, 4], 102.0)  # it has taken something
    # by now this sampler knows how long a turn takes
    assert turns.patience == pytest.approx(TIMES * (100.0 - 10.1 - FIRST_SECONDS))
    assert turns.mine([2, 4], 102.1 + turns.patience)


def test_more_classes_than_samplers():
    with pytest.raises(ValueError, match="2 samplers cannot form 3 classes"):
        SwapTurns(0, 2, 3)


def test_the_bound_goes_before_the_turns():
    facts = {"busy": True, "ready": True, "idle_slots": False, "wanted": False, "turn": False}
    assert not takes_now(**facts)
    for name in ("idle_slots", "wanted", "turn"):
        assert takes_now(**facts | {name: True})
        assert not takes_now(**facts | {name: True, "ready": False})
    assert takes_now(**facts | {"busy": False, "ready": False})


# -- a model --------------------------------------------------------------------------------------


class Modelled:
    """A sampler of a model: weights come and it takes them, all at random times."""

    def __init__(self, index, samplers, classes):
        self.turns = SwapTurns(index, samplers, classes)
        self.index, self.own = index, index % classes
        self.taken = [0] * samplers  # as it has heard
        self.delivered = 0
        self.loading = None  # version
        self.paused = self.dead = False

    @property
    def held(self):
        return self.taken[self.index]


def model(seed, *, dies):
    """Runs a random job until all samplers have the last version; returns the events."""
    draw = random.Random(seed)
    classes = draw.randint(2, 4)
    samplers = draw.randint(classes, 7)
    world = [Modelled(index, samplers, classes) for index in range(samplers)]
    versions = sorted(draw.sample(range(1, 30), 8))
    published, now, events = [], 0.0, 0
    if dies:
        world[draw.randrange(samplers)].dead = True

    def publish():
        published.append(versions[len(published)])

    def deliver(one):
        one.turns.publish(published[one.delivered])
        one.delivered += 1

    def look(one, idle):
        newest = published[one.delivered - 1]
        turn = one.turns.mine(one.taken, now)
        if takes_now(busy=True, ready=True, idle_slots=idle, wanted=False, turn=turn):
            one.loading, one.paused = newest, not idle
            paused = {other.own for other in world if other.paused}
            assert dies or len(paused) <= 1, f"seed {seed}: classes {paused} pause"

    def end(one):
        one.taken[one.index], one.loading, one.paused = one.loading, None, False
        one.turns.took(0.1, now)

    def hear(one, other):
        one.taken[other.index] = other.held

    while any(one.held < versions[-1] for one in world if not one.dead):
        choices = [(publish, ())] if len(published) < len(versions) else []
        for one in world:
            if one.dead:
                continue
            if one.delivered < len(published):
                choices.append((deliver, (one,)))
            if one.loading is not None:
                choices.append((end, (one,)))
            elif one.delivered and published[one.delivered - 1] > one.held:
                choices += [(look, (one, draw.random() < 0.1)), (look, (one, False))]
            for other in world:
                if one.taken[other.index] < other.held:
                    choices.append((hear, (one, other)))
        what, given = draw.choice(choices)
        what(*given)
        events += 1
        # time passes only where somebody may be dead: without, nobody is ever passed over
        now += draw.uniform(0, 5) if dies else 0.0
        assert events < 20_000, f"seed {seed}: samplers wait"
    return events


@pytest.mark.parametrize("dies", [False, True], ids=["all alive", "one dead"])
def test_one_class_pauses_at_a_time_and_all_get_the_last_weights(dies):
    total = seed = 0
    while total < 30_000:
        total += model(seed, dies=dies)
        seed += 1


@pytest.mark.slow
def test_a_million_events():
    total, seed = 0, 100_000
    while total < 1_000_000:
        total += model(seed, dies=bool(seed % 2))
        seed += 1


# -- threads with connections ---------------------------------------------------------------------


class BusySampler:
    """What the thread of a sampler needs of one that always has something under way."""

    def __init__(self):
        self.version, self.busy, self.in_turns = 0, True, False
        self.counts = Counts(idle_slots=0)

    def free_weights(self):
        """Nothing is in flight."""

    def load(self, params, version, *, cache):
        self.version = version


class Staggered:
    """A process of a job of threads: the thread of its sampler, with real connections."""

    def __init__(self, index, count, exchange, classes, pausing):
        self.own, self.pausing = index % classes, pausing
        self.draw, lock = random.Random(f"{count}{index}"), threading.Condition()
        self.peers = Peers(exchange, index, count, lambda: None)
        news = SamplerNews(self.peers, index, count, held=0)
        producer = types.SimpleNamespace(
            sampler=BusySampler(),
            lock=lock,
            admission=Admission(Rule(1, 1)),
            admit=lambda: False,
            has_idle_slots=False,
            starving=False,
        )
        self.sampler = producer.sampler
        turns = SwapTurns(index, count, classes)
        self.thread = SamplingThread(
            producer,
            self.arrive,
            lambda: time.sleep(self.draw.uniform(0, 0.002)),
            order=None,
            evaluations=None,
            cache="keep",
            buffers=2,
            swaps=InFlightSwaps(news, turns, now=lambda: 0.0),  # nobody is passed over
        )

    @contextlib.contextmanager
    def arrive(self, left):
        self.pausing.append(self.own)
        assert set(self.pausing) == {self.own}
        time.sleep(self.draw.uniform(0, 0.003))
        yield left
        self.pausing.remove(self.own)


@pytest.mark.parametrize("count, classes", [(4, 4), (5, 2)])
def test_threads_pause_one_class_after_the_other(count, classes):
    listeners = [listen("127.0.0.1") for _ in range(count)]
    places = [("127.0.0.1", one.getsockname()[1]) for one in listeners]
    pausing = []

    def start(index):
        exchange = HostExchange(index, places, listeners[index], b"x" * 16)
        return Staggered(index, count, exchange, classes, pausing)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        world = list(pool.map(start, range(count)))
    draw = random.Random(1)
    for version in range(1, 30):
        for one in draw.sample(world, count):
            one.thread.make_room()
            one.thread.deliver(types.SimpleNamespace(ready=True), version)
            one.thread.raise_error()
        time.sleep(draw.uniform(0, 0.02))

    def are_loaded():
        for one in world:
            one.thread.raise_error()
        return all(one.sampler.version >= version for one in world)

    until(are_loaded)
    for one in world:
        one.thread.close()
        one.peers.close()
