"""Groups and weights that the thread of a sampler is about to take, as the training sees them."""

import contextlib
import itertools
import math
import threading
import types

import pytest
from support.tiny_model import prompt_of
from support.waiting import HANG, until

from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.dag.graph import Node
from distflow_jax.environments.episode_sampler import Counts
from distflow_jax.layout import Layout
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.stream.exact_order import Work
from distflow_jax.stream.links.local_link import OrderedLink, ThreadLink
from distflow_jax.stream.producer import Producer, SamplingNode
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.sampling_side import Hooks
from distflow_jax.stream.saved_samples import SavedSamples
from distflow_jax.stream.schedule import Admission, Rule
from distflow_jax.stream.task_buffer import TaskBuffer

pytestmark = pytest.mark.usefixtures("eager_threads")
BATCH, STEPS = 4, 300
NODE = Node("gen", "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"], ["response"])


class NoSampler:
    """The calls of a sampler that a worker makes; it is busy as the test says, and never ends."""

    in_turns = False

    def __init__(self):
        self.version, self.busy, self.counts, self.rounds = 0, False, Counts(), 0

    def submit(self, key, request, progress):
        """Takes a request."""

    def round(self):
        self.rounds += 1
        return []

    def progress(self):
        return {}

    def free_weights(self):
        """Nothing is in flight."""

    def load(self, params, version, *, cache):
        """Takes weights, which must be newer."""
        assert version > self.version and params.version == version
        self.version = version

    def close(self):
        """Holds nothing."""


def producer_of(draw, **bounds):
    rule, lock = Rule(BATCH, max_staleness=1), threading.Condition()
    buffer = TaskBuffer(rule, exact=False, version=0, lease_seconds=math.inf, max_tries=1)
    return Producer(
        SampleRequests(buffer, lock),
        Admission(rule, **bounds),
        [SamplingNode(NODE, SamplingParams(2, 4), None)],
        draw,
        writers={None: Layout("host"), "gen": Layout("host")},
        num_samples=2,
        saved=SavedSamples(),
    )


def thread_of(sampler, producer, kind=ThreadLink, *, idle=lambda: None, evaluations=None):
    """A worker in a thread of its own."""
    sync = types.SimpleNamespace(arrive=lambda left: left)
    link = kind(StreamConfig(max_staleness=1), sampler, producer, sync)
    block = contextlib.nullcontext
    link.start(Hooks(producer.collect, block, block, idle, evaluations, lambda end: True))
    return link


def test_no_group_is_overlooked_while_it_begins():
    """The training takes a step's groups once all have begun: then they are there."""
    until(looks_in_between, lambda: "the threads did not alternate", pause=0.0)


def looks_in_between():
    """How often the training looked before all of a step had begun."""
    firsts = itertools.count(0, BATCH)

    def draw():  # one prompt of each batch is this process's
        return [prompt_of(next(firsts) + 1, [1])]

    producer = producer_of(draw)

    def begin_all():
        for version in range(STEPS):
            with producer.lock:
                producer.buffer.publish(version)
            producer.admit()

    thread = threading.Thread(target=begin_all)
    thread.start()
    seen = 0
    for step in range(1, STEPS + 1):
        end = step * BATCH
        while True:
            with producer.lock:
                if producer.begun_up_to(end):
                    assert end - BATCH + 1 in producer.groups
                    break
                seen += 1
    thread.join()
    return seen


def test_weights_that_come_while_others_are_taken():
    """A sampler takes the newest, whichever it was about to take."""
    sampler = NoSampler()
    thread = thread_of(sampler, producer_of(lambda: None, steps=1))
    for version in range(1, 200 * STEPS):
        thread.deliver(types.SimpleNamespace(ready=True, version=version), version)
        thread.raise_error()
    with thread.hold(version):
        assert sampler.version == version
    thread.close()
    thread.raise_error()


def test_responses_under_way_go_on_until_the_weights_are_there():
    """A sampler without any waits for them; when it has nothing to do it says so."""
    sampler, idle = NoSampler(), threading.Event()
    producer = producer_of(lambda: None, steps=1)
    sampler.busy = True

    def until(true):
        with producer.lock:
            assert producer.lock.wait_for(true, 20)

    thread = thread_of(sampler, producer, idle=idle.set)
    weights = types.SimpleNamespace(ready=False, version=1)
    thread.deliver(weights, 1)
    before = sampler.rounds
    while sampler.rounds < before + 5:
        thread.raise_error()
    assert sampler.version == 0 and not idle.is_set()
    weights.ready = True
    until(lambda: sampler.version == 1)
    sampler.busy = False
    assert idle.wait(HANG)
    thread.deliver(types.SimpleNamespace(ready=False, version=2), 2)
    until(lambda: sampler.version == 2)
    thread.close()
    thread.raise_error()


class Overtaken(threading.Condition):
    """A lock behind whose next release another thread comes first."""

    then = None

    def __exit__(self, *error):
        super().__exit__(*error)
        then, self.then = self.then, None
        if then is not None:
            then()


def test_weights_for_an_evaluation_are_not_dropped_before_they_are_taken():
    """The order has given the work away; the trainer makes room for its next weights."""
    producer = producer_of(lambda: None, steps=1)
    lock, evaluated = Overtaken(), []
    producer.lock = lock

    def next_work(newest):
        if newest < 1 or evaluated:
            return None
        lock.then = thread.make_room
        return Work(1, None)

    class Ordered(OrderedLink):
        def start(self, hooks):
            self._order = types.SimpleNamespace(next=next_work, needs=lambda version: False)
            ThreadLink.start(self, hooks)

    made = types.SimpleNamespace(make=lambda sampler, heard: evaluated.append(sampler.version))
    thread = thread_of(NoSampler(), producer, Ordered, evaluations=made)
    thread.deliver(types.SimpleNamespace(ready=True, version=1), 1)
    with lock:
        assert lock.wait_for(lambda: evaluated, 20)
    thread.close()
    thread.raise_error()
    assert evaluated == [1]
