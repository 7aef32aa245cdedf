"""Questions that wait at a task buffer, slow task buffers, and more workers than open files."""

import dataclasses
import threading
import time
import types

import pytest
from support.counted_buffers import TABLES, Trainers, request_of, working
from support.task_buffer_calls import LEASE, Buffer
from support.waiting import HANG, until

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.runtime.samplers import file_limit
from distflow_jax.runtime.samplers.file_limit import most_workers, raise_file_limit
from distflow_jax.stream.frames.frames import Frame
from distflow_jax.stream.links import worker_pool
from distflow_jax.stream.tasks import SAMPLING
from distflow_jax.stream.wire.calls import Refused


def facts_of(answer):
    return Frame.of_bytes(answer.result(0)).facts


def test_a_question_waits_for_tasks_and_as_many_are_answered_as_there_are():
    buffer = Buffer()
    waiting = [buffer.call(f"w{i}", waits=True) for i in range(5)]
    buffer.look()
    assert not any(answer.done() for answer in waiting)
    for counter in (0, 1):
        buffer.requests.begin((counter, "gen"), request_of(counter), Progress())
    buffer.look()
    assert [answer.done() for answer in waiting] == [True, True, False, False, False]
    assert facts_of(waiting[0])["again"] == 0.0
    for worker in ("w0", "w1"):
        assert Frame.of_bytes(buffer.call(worker, capacity=2)).facts["keys"]
    buffer.look()
    assert not any(answer.done() for answer in waiting[2:])


def test_a_question_of_one_that_has_gone_takes_no_turn():
    buffer = Buffer()
    gone, other = (buffer.call(worker, waits=True) for worker in ("gone", "other"))
    gone.cancel()
    buffer.requests.begin((0, "gen"), request_of(0), Progress())
    buffer.look()
    buffer.look()
    assert facts_of(other)["again"] == 0.0


def test_all_questions_that_wait_hear_of_weights_and_of_the_end():
    buffer = Buffer()
    buffer.look()
    first = [buffer.call(f"w{i}", waits=True) for i in range(3)]
    with buffer.lock:
        buffer.tasks.publish(1)
    buffer.look()
    assert [facts_of(answer)["newest"] for answer in first] == [1, 1, 1]
    second = [buffer.call(f"w{i}", waits=True) for i in range(3)]
    buffer.service.end(0.0)
    assert all(facts_of(answer)["ended"] for answer in second)


def evaluate(buffer, version, counter):
    """Begins an evaluation, and says which workers take part."""
    with buffer.lock:
        request = dataclasses.replace(request_of(counter), version=version)
        buffer.requests.evaluate(version, request, 0)
        buffer.tasks.expire(time.monotonic())


def test_those_alone_hear_of_an_evaluation_who_should_hold_its_version():
    buffer = Buffer()
    with buffer.lock:
        buffer.tasks.publish(1)
    buffer.look()
    names = [f"w{i}" for i in range(4)]
    waiting = {name: buffer.call(name, version=1, waits=True) for name in names}
    evaluate(buffer, 0, 900)
    buffer.look()
    (name,) = [name for name in names if waiting[name].done()]
    assert facts_of(waiting[name])["evaluates"] == 0
    # it has nothing to take while it drains, and does not wait: its task does
    asked = Frame.of_bytes(buffer.call(name, version=1, capacity=0)).facts
    assert (asked["again"], asked["evaluates"]) == (pytest.approx(0.1), 0)
    assert Frame.of_bytes(buffer.call(name, version=0)).facts["keys"]
    over = buffer.call(name, version=0, capacity=0, waits=True)
    with buffer.lock:
        buffer.tasks.expire(time.monotonic())
    buffer.look()
    assert facts_of(over)["evaluates"] is None  # no task of it waits: the newest version is right


@pytest.mark.parametrize("method", ["lease", "lease_node"])
def test_a_question_of_one_that_does_not_know_the_newest_version_does_not_wait(method):
    buffer = Buffer()
    known = list(buffer.service._known("w"))
    with buffer.lock:
        buffer.tasks.publish(1)
    buffer.look()
    found = buffer.service.methods()[method](
        "w", Frame(LEASE | {"nodes": ["score"], "waits": known}).to_bytes()
    )
    facts = Frame.of_bytes(found).facts
    assert (facts["newest"], facts["again"]) == (1, 0.0)


def test_a_question_waits_for_a_third_of_a_lease_at_most():
    buffer = Buffer()
    answer = buffer.call("w", waits=True)
    buffer.look(19.0)
    assert not answer.done()
    buffer.look(20.5)
    assert answer.done()


@pytest.mark.parametrize(("samples", "woken"), [(True, True), (False, False)])
def test_one_that_runs_nodes_and_samples_waits_for_both(samples, woken):
    buffer = Buffer()
    answer = buffer.call("w", "lease_node", nodes=["score"], waits=True, samples=samples)
    buffer.requests.begin((0, "gen"), request_of(0), Progress())
    buffer.look()
    assert answer.done() == woken


def test_where_tasks_wait_that_a_worker_does_not_get_it_is_said_when_to_ask():
    buffer = Buffer()
    buffer.requests.begin((0, "gen"), request_of(0), Progress())
    asked, hinted = (buffer.call("w", capacity=0, waits=waits) for waits in (False, True))
    assert Frame.of_bytes(asked).facts["again"] == pytest.approx(0.1)
    assert Frame.of_bytes(hinted).facts["again"] == 0.0  # they came since it was asked


def test_one_that_gets_nothing_asks_for_a_hint_at_once():
    buffer = Buffer()
    assert Frame.of_bytes(buffer.call("w")).facts["again"] == 0.0


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("processes", [1, 3])
def test_no_step_waits_for_a_worker_that_was_told_to_ask_later(
    tmp_path, monkeypatch, exact, processes
):
    """It asks again once it has submitted a group, has room, or holds other weights."""
    monkeypatch.setattr(worker_pool, "LEAST_SECONDS", 20.0)
    trainers = Trainers(tmp_path, exact=exact, processes=processes)
    with working(tmp_path):
        trainers.train(12)
        trainers.close()


def test_one_worker_too_many_for_the_open_files_is_refused_in_one_line():
    buffer = Buffer(most_workers=2)
    for worker in ("w0", "w1", "w0"):
        buffer.call(worker, "register", **TABLES)
    with pytest.raises(Refused, match=r"^2 workers talk to this trainer already, .*ulimit -n"):
        buffer.call("w2", "register", **TABLES)
    buffer.call("w0", "deregister")
    buffer.call("w2", "register", **TABLES)


def test_the_limit_of_open_files_is_raised_or_respected(monkeypatch):
    limits = [1024, 4096]

    def change(kind, wanted):
        if wanted[1] > limits[1]:
            raise ValueError("not allowed")
        limits[:] = wanted

    known = types.SimpleNamespace(
        RLIMIT_NOFILE=7, getrlimit=lambda kind: tuple(limits), setrlimit=change
    )
    monkeypatch.setattr(file_limit, "resource", known)
    assert raise_file_limit() == 4096 and limits == [4096, 4096]
    known.setrlimit = lambda kind, wanted: change(kind, (0, 1 << 40))
    assert raise_file_limit() == 4096
    assert most_workers(4096) == 1024 and most_workers(-1) > 1 << 20 and most_workers(2) == 1


def test_an_idle_worker_waits_at_its_task_buffer_and_gets_work_at_once(tmp_path):
    trainers = Trainers(tmp_path, exact=False, processes=1)
    waiting = trainers.answers[0]._waiting
    with working(tmp_path):
        trainers.train(4)
        until(lambda: len(waiting) == 1)  # all that may begin is answered
        assert not trainers.requests[0].buffer.num_open(SAMPLING)
        trainers.train(8)
        trainers.close()


def test_a_task_buffer_that_does_not_answer_delays_no_lease_of_another(tmp_path):
    trainers, others_done = Trainers(tmp_path, exact=False, processes=3), threading.Event()
    slow = trainers.servers[1]
    lease = slow._methods["lease"]

    def blocked(worker, payload):
        assert others_done.wait(HANG)
        return lease(worker, payload)

    slow._quick, slow._methods["lease"] = frozenset(), blocked
    with working(tmp_path):
        buffers = [trainers.requests[place].buffer for place in (0, 2)]
        begun = sum(buffer.num_open(SAMPLING) for buffer in buffers)
        assert begun >= 5
        until(lambda: sum(len(buffer.complete) for buffer in buffers) == begun)
        others_done.set()
        trainers.train(3)
        trainers.close()
