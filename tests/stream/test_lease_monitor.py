"""The thread of a task buffer tells of workers that are missing, or give nothing, by our clock."""

import contextlib
import dataclasses
import threading

import pytest
from support.tiny_model import prompt_of
from support.waiting import until

from distflow_jax.dag.graph import Node
from distflow_jax.layout import Layout
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.stream import lease_monitor
from distflow_jax.stream.lease_monitor import LeaseMonitor
from distflow_jax.stream.producer import Producer, SamplingNode
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.saved_samples import SavedSamples
from distflow_jax.stream.schedule import Admission, Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.tasks import SAMPLING, Piece

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


@pytest.fixture
def waiting(monkeypatch, caplog):
    """(task buffer, thread, after): two steps of two groups wait; `after(seconds)` is the log
    then."""
    clock, lock = Clock(), threading.Condition()
    monkeypatch.setattr(lease_monitor, "time", clock)
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
    thread = LeaseMonitor(
        producer,
        lambda: None,
        lambda params, version: None,
        known=lambda end: True,
        idle=lambda: after.starving.append(producer.starving),
        no_workers_seconds=NO_WORKERS,
        how="distflow worker --join=x",
        leave=lambda: None,
    )
    with contextlib.closing(thread):
        yield buffer, thread, after


def test_trainers_without_a_worker_say_so_each_minute_until_one_comes(waiting):
    buffer, thread, after = waiting
    assert after(59.0) == []
    (line,) = after(1.2)
    assert line == (
        "no worker was at work for 60 s, and 4 groups wait for one; start one: "
        "distflow worker --join=x"
    )
    assert len(after(59.0)) == 1
    assert "for 120 s" in after(1.2)[1]
    assert thread.missing_workers == ["gen"]
    buffer.heartbeat("w", after.clock.now)
    assert len(after(1.0)) == 2 and thread.missing_workers == []


def test_prompts_that_nobody_puts_count_as_waiting(waiting):
    buffer, thread, after = waiting
    after(0.0)
    whole = Piece(1, 0, 0, True, None)
    for work in buffer.lease("w", 0, 100, 0.0):
        buffer.submit("w", work.key, {0: whole, 1: whole}, 0.0)
    buffer.deregister("w")
    assert buffer.num_open(SAMPLING) == 0
    assert after(NO_WORKERS + 1) == [] and thread.missing_workers == []
    buffer.publish(1)  # groups of step 3 may begin, and have no prompts
    after(0.0)
    assert thread.missing_workers == []
    (line,) = after(NO_WORKERS + 1)
    assert "0 groups wait for one, and prompts are missing; start one" in line
    assert thread.missing_workers == ["gen"]


def test_a_worker_whose_leases_only_end_is_named_once_and_counts_as_missing(waiting):
    buffer, thread, after = waiting
    after(0.0)
    assert len(buffer.lease("w", 0, 100, 0.0)) == 4
    assert after(LEASE / 2) == []
    buffer.heartbeat("w", after.clock.now)
    (line,) = after(LEASE / 2)
    assert line.startswith("worker w is stalled: it submitted nothing of its groups for a lease")
    for _ in range(30):
        buffer.lease("w", 0, 100, after.clock.now)
        lines = after(LEASE / 2)
        assert buffer.workers
    assert thread.missing_workers == ["gen"]
    told = [line for line in lines if "no worker was at work" in line]
    assert len(told) == 2 and len(lines) == 3


def test_a_worker_without_work_is_told_of_while_others_sample_if_newer_weights_help(waiting):
    buffer, _, after = waiting
    after(0.0)
    assert len(buffer.lease("a", 0, 100, 0.0)) == 4
    assert after(0.0) == [] and not after.starving[-1]
    buffer.lease("b", 0, 100, 0.0, idle=True)
    assert after(0.0) == [] and after.starving[-1]
