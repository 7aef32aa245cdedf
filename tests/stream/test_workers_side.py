"""The thread of a task buffer tells of workers that are missing, or give nothing, by our clock."""

import contextlib
import dataclasses
import threading
import time

import jax.numpy as jnp
import pytest
from support.tiny_model import prompt_of
from support.waiting import until

from distflow_jax.dag.graph import Node
from distflow_jax.layout import Layout
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.runtime.samplers.worker_log import Move, WorkerLog
from distflow_jax.stream import workers_side
from distflow_jax.stream.evaluations import NOTHING_EVALUATED, Evaluations
from distflow_jax.stream.host_nodes import NodesAhead
from distflow_jax.stream.host_thread import HostThread
from distflow_jax.stream.producer import Producer, SamplingNode
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.sampling_side import Hooks
from distflow_jax.stream.saved_samples import SavedSamples
from distflow_jax.stream.schedule import Admission, Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.tasks import SAMPLING, Piece
from distflow_jax.stream.weight_store import WeightStore
from distflow_jax.stream.workers_side import LEAVING_SECONDS, WorkerServer, WorkersSide

LEASE, NO_WORKERS = 10.0, 100.0
NODE = Node("gen", "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"], ["response"])


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class Counting(Producer):
    """Counts the rounds of its thread."""

    rounds = 0

    def admit(self):
        self.rounds += 1
        super().admit()


def hooks(evaluations, idle=lambda: None):
    """Calls of the monitor to the training, of which only `idle` is looked at."""
    return Hooks(
        lambda: None,
        contextlib.nullcontext,
        contextlib.nullcontext,
        idle,
        evaluations,
        known=lambda end: True,
    )


@pytest.fixture
def waiting(monkeypatch, caplog):
    """(task buffer, thread, after): two steps of two groups wait; `after(seconds)` is the log
    then."""
    clock, lock = Clock(), threading.Condition()
    monkeypatch.setattr(workers_side, "time", clock)
    buffer = TaskBuffer(Rule(2, 1), exact=False, version=0, lease_seconds=LEASE, max_tries=2)
    prompts = [dataclasses.replace(prompt_of(c + 1, [1, 2]), counter=c) for c in range(4)]
    batches = [prompts[:2], prompts[2:]]
    producer = Counting(
        SampleRequests(buffer, lock),
        Admission(Rule(2, max_staleness=1)),
        [SamplingNode(NODE, SamplingParams(2, 4), None)],
        lambda: batches.pop(0) if batches else None,
        writers={None: Layout("host"), "gen": Layout("host")},
        num_samples=2,
        saved=SavedSamples(),
    )

    def after(seconds):
        clock.now += seconds
        seen = producer.rounds
        until(lambda: producer.rounds >= seen + 3)
        thread.raise_error()
        return [record.getMessage() for record in caplog.records]

    after.clock, after.starving = clock, []
    caplog.set_level("INFO", "distflow_jax")
    workers = WorkerLog("distflow worker --join=x")
    thread = WorkersSide(
        producer,
        lambda params, version, evaluated: 0,
        open_evaluations=2,
        no_workers_seconds=NO_WORKERS,
        server=WorkerServer(workers.moved, workers.missing, lambda now: None, lambda: None),
    )
    evaluations = Evaluations(NOTHING_EVALUATED, None, held=0)
    thread.start(hooks(evaluations, idle=lambda: after.starving.append(producer.starving)))
    with contextlib.closing(thread):
        yield buffer, thread, after


def test_trainers_without_a_worker_say_so_soon_and_each_minute_until_one_comes(waiting):
    buffer, thread, after = waiting
    assert after(9.0) == []
    (line,) = after(1.2)
    assert line == (
        "waiting for samples: no worker has joined, and 4 prompts are waiting for one; unless a "
        "worker is already starting, start one: distflow worker --join=x"
    )
    assert len(after(59.0)) == 1
    assert "no worker has joined" in after(1.2)[1]
    after(40.0)
    assert thread.missing_workers == ["gen"]
    buffer.heartbeat("w", after.clock.now)
    assert after(1.0)[2:] == ["worker w joined (1 at work)"] and thread.missing_workers == []
    with thread.hold(0):
        buffer.deregister("w")
    assert after(9.0)[3:] == ["worker w left (0 at work)"]
    assert "no worker was at work for 10 s" in after(1.2)[4]


def test_a_worker_that_is_silent_is_lost_with_its_groups_and_no_stalled_one(waiting):
    buffer, thread, after = waiting
    after(0.0)
    assert len(buffer.lease("w", 0, 6, 0.0)) == 3
    after(1.0)
    buffer.heartbeat("w", after.clock.now)  # a question, after which it is killed
    lines = after(LEASE)
    assert (
        lines[1] == "worker w sent nothing for 10 s; its 3 groups go to other workers (0 at work)"
    )
    assert not buffer.workers and len(buffer.lease("v", 0, 100, after.clock.now)) == 4


def test_a_thousand_workers_make_few_lines(caplog):
    caplog.set_level("INFO", "distflow_jax")
    events = []
    told = WorkerLog("", lambda event, facts: events.append((event, facts)))
    for number in range(1000):
        told.moved([Move(f"w{number}", "joined")], number + 1, now=number / 100)
    told.moved([Move(f"w{n}", "lost", 8, 60.0 + n / 100) for n in range(1000)], 0, now=20.0)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[1] == "workers w1, w2, w3 and 497 more joined (501 at work)"
    assert lines[-1] == (
        "workers w0, w1, w2 and 997 more sent nothing for 70 s; their 8000 groups go to other "
        "workers (0 at work)"
    )
    assert len(lines) == len(events) == 4
    assert events[-1] == (
        "workers",
        {"what": "lost", "names": ["w0", "w1", "w2"], "count": 1000, "at_work": 0},
    )


def test_a_trainer_that_is_told_to_end_waits_for_a_missing_worker_a_few_seconds(waiting):
    buffer, thread, after = waiting
    buffer.heartbeat("w", after.clock.now)
    after(3.0)
    assert thread.status() == "workers at work: 1, last heard 3 s ago"
    thread.stop_waiting()
    after(4.0)
    assert thread.missing_workers == []  # it still counts
    buffer.deregister("w")
    assert thread.status() == "no worker is at work"
    after(0.0)
    after(LEAVING_SECONDS + 1)
    assert thread.missing_workers == ["gen"]


def test_prompts_that_nobody_puts_count_as_waiting(waiting):
    buffer, thread, after = waiting
    after(0.0)
    whole = Piece(1, 0, 0, True, None)
    for work in buffer.lease("w", 0, 100, 0.0):
        buffer.submit("w", work.key, {0: whole, 1: whole}, 0.0)
    buffer.deregister("w")
    assert buffer.num_open(SAMPLING) == 0
    after(NO_WORKERS + 1)
    assert thread.missing_workers == []
    buffer.publish(1)  # groups of step 3 may begin, and have no prompts
    after(0.0)
    assert thread.missing_workers == []
    lines = after(NO_WORKERS + 1)
    assert "0 prompts are waiting for one, and further ones cannot begin; unless" in lines[-1]
    assert thread.missing_workers == ["gen"]


def test_a_worker_whose_leases_only_end_is_named_once_and_counts_as_missing(waiting):
    buffer, thread, after = waiting
    after(0.0)
    assert len(buffer.lease("w", 0, 100, 0.0)) == 4
    assert after(LEASE / 2) == ["worker w joined (1 at work)"]
    buffer.heartbeat("w", after.clock.now)
    line = after(LEASE / 2)[1]
    assert line.startswith("worker w stalled: called, but submitted nothing of its groups for a l")
    for _ in range(30):
        buffer.lease("w", 0, 100, after.clock.now)
        lines = after(LEASE / 2)
        assert buffer.workers
    assert thread.missing_workers == ["gen"]
    told = [line for line in lines if "no worker was at work" in line]
    assert len(told) == 3 and len(lines) == 5


def test_a_worker_without_work_is_told_of_while_others_sample_if_newer_weights_help(waiting):
    buffer, _, after = waiting
    after(0.0)
    assert len(buffer.lease("a", 0, 100, 0.0)) == 4
    after(0.0)
    assert not after.starving[-1]
    buffer.lease("b", 0, 100, 0.0, idle=True)
    after(0.0)
    assert after.starving[-1]


def test_workers_that_errors_end_one_after_the_other_count_as_missing(waiting):
    """As where environments fail on each of them; a response that comes shows otherwise."""
    buffer, thread, after = waiting
    for number in range(12):
        buffer.heartbeat(f"w{number}", after.clock.now)
        after(NO_WORKERS / 10)
        buffer.deregister(f"w{number}", unfit=True)
    assert thread.missing_workers == ["gen"]
    buffer.heartbeat("good", after.clock.now)
    assert thread.missing_workers == []
    (work,) = buffer.lease("good", 0, 2, after.clock.now)
    buffer.submit("good", work.key, {0: Piece(1, 0, 0, True, None)}, after.clock.now)
    after(1.0)
    buffer.deregister("good")
    assert thread.missing_workers == []


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "in_turns"])
@pytest.mark.parametrize("goes", ["in order", "lost"])
def test_a_worker_at_work_after_an_error_of_another_may_leave_for_a_moment(waiting, tokens, goes):
    """Its first response takes longer than a run waits for workers; in turns it shows no tokens."""
    buffer, thread, after = waiting
    after(0.0)
    buffer.heartbeat("bad", after.clock.now)
    (work,) = buffer.lease("good", 0, 2, after.clock.now)
    with thread.hold(0):
        buffer.deregister("bad", unfit=True)
    for count in range(30):
        after(NO_WORKERS / 20)
        piece = {0: Piece(10 * count, 0, 0, False, None)} if tokens else {}
        with thread.hold(0):
            buffer.submit("good", work.key, piece, after.clock.now)
    assert buffer.unfit != tokens and thread.missing_workers == []
    if goes == "in order":
        with thread.hold(0):
            buffer.deregister("good")
    after(LEASE + 1)
    assert not buffer.at_work() and thread.missing_workers == []
    after(NO_WORKERS + 1)
    assert thread.missing_workers == ["gen"]


def test_workers_that_are_ended_do_not_hide_errors_of_others(waiting):
    buffer, thread, after = waiting
    for number in range(12):
        buffer.heartbeat(f"w{number}", after.clock.now)
        after(NO_WORKERS / 10)
        with thread.hold(0):
            if number % 2:
                buffer.end(f"w{number}", "too much was refused", after.clock.now)
            else:
                buffer.deregister(f"w{number}", unfit=True)
    assert thread.missing_workers == ["gen"]


@pytest.fixture
def evaluating():
    """(thread, task buffer, weight store, evaluations) of a run that evaluates even versions, by
    three problems each, and keeps two versions."""
    lock, weights = threading.Condition(), WeightStore("a run")
    buffer = TaskBuffer(Rule(2, 1), exact=False, version=0, lease_seconds=LEASE, max_tries=2)
    producer = Producer(
        SampleRequests(buffer, lock),
        Admission(Rule(2, max_staleness=1)),
        [SamplingNode(NODE, SamplingParams(2, 4), None)],
        lambda: None,
        writers={None: Layout("host"), "gen": Layout("host")},
        num_samples=2,
        saved=SavedSamples(),
    )
    prompts = [dataclasses.replace(prompt_of(1, [1, 2]), counter=10**9 + c) for c in range(3)]
    params = SamplingParams(1, 4, 0.0, record=False)
    evaluator = dataclasses.replace(
        NOTHING_EVALUATED,
        due=lambda version: version % 2 == 0,
        requests=lambda version: [GroupRequest(p, params, version=version) for p in prompts],
        score=lambda answers: answers,
    )
    host = HostThread(NodesAhead(frozenset({"gen"}), (), {}), contextlib.nullcontext, lock, buffer)
    evaluations = Evaluations(evaluator, host.call, held=0)

    def store(params, version, evaluated):
        weights.put(version, params)
        weights.keep(version - 1, evaluated)
        return 8

    workers = WorkerLog("")
    thread = WorkersSide(
        producer,
        store,
        open_evaluations=2,
        no_workers_seconds=NO_WORKERS,
        server=WorkerServer(workers.moved, workers.missing, lambda now: None, lambda: None),
    )
    thread.start(hooks(evaluations))
    weights.put(0, {"w": jnp.zeros(4)})
    with contextlib.closing(host), contextlib.closing(thread):
        yield thread, buffer, weights, evaluations


def test_a_version_is_kept_until_its_evaluation_is_recorded(evaluating):
    """By the worker that brings the answers; others bring none."""
    thread, buffer, weights, evaluations = evaluating

    def bring(version):
        thread.bring({"w": jnp.full(4, version)}, version)

    def evaluate(version):
        with thread.hold(version):
            buffer.heartbeat("w", time.monotonic())
        until(lambda: buffer.evaluates("w") == version)
        with thread.hold(version):
            tasks = buffer.lease("w", version, 3, time.monotonic())
            for task in tasks:
                piece = Piece(1, version, version, True, (version, task.key[0]))
                buffer.submit("w", task.key, {0: piece}, time.monotonic())
        assert len(tasks) == 3
        until(lambda: version not in evaluations.missing(version), thread.raise_error)

    for version in range(1, 5):
        bring(version)
    assert weights.versions == [0, 2, 3, 4]  # 1 is forgotten
    assert thread.evaluated_by(4) == 0  # three are open, and two versions kept: the first is due
    assert thread.evaluated_by(3) == -1
    evaluate(0)
    assert thread.evaluated_by(3) == 1  # nothing else is there
    (found,) = evaluations.take(1)
    assert found.version == 0 and found.scored == [(0, 10**9 + place) for place in range(3)]
    bring(5)
    assert weights.versions == [2, 4, 5]
    evaluate(2)
    assert weights.versions == [2, 4, 5]  # not yet recorded
    assert [found.version for found in evaluations.take(thread.evaluated_by(5))] == [2]
    bring(6)
    assert weights.versions == [4, 5, 6]
    assert evaluations.open(6) == [4, 6]
