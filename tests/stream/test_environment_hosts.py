"""Environments that run on other hosts: frames, calls over real sockets, and hosts that end."""

import asyncio
import contextlib
import dataclasses
import logging
import queue
import re
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from support.counted_buffers import TABLES, Trainers
from support.tiny_model import prompt_of
from support.waiting import HANG, until

from distflow_jax.environments.environment import Shown, Turn
from distflow_jax.environments.event_loop import EnvironmentsFailed
from distflow_jax.environments.failures import CallFailure
from distflow_jax.environments.handle import EnvironmentHandle
from distflow_jax.environments.registry import CallLimits, Environments, Observed
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.stream.frames import environment_frames
from distflow_jax.stream.frames.environment_frames import (
    EnvironmentCall,
    answers_frame,
    answers_of,
    calls_frame,
    calls_of,
    failed,
    returned,
)
from distflow_jax.stream.frames.frames import Frame
from distflow_jax.stream.links import environment_host, environment_hosts
from distflow_jax.stream.links.buffer_client import BufferClient
from distflow_jax.stream.links.buffer_links import Joining
from distflow_jax.stream.links.environment_host import CALL, EnvironmentHost
from distflow_jax.stream.links.environment_hosts import EnvironmentHosts
from distflow_jax.stream.links.remote_link import WorkerState
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.tasks import ENVIRONMENT
from distflow_jax.stream.wire.calls import Refused
from distflow_jax.stream.wire.wire_client import WireClient

HERE, TOKEN = __name__, b"the token of this run"
TOKENIZER = Tokenizer.byte_level(259)
PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
LOGGED = {"asked": 1.0, "found": 0.5}
ODD = {"long": "中" * 30_000, "huge": "x" * (1 << 17), "empty": np.array([], object)}


class Adder:
    """Adds the digits that it was told so far."""

    open: list = []
    held = threading.Event()  # what `hold` waits for
    repeatable = False
    away = 0  # calls of steps that fail

    def __init__(self, tokenizer):
        self.told = []
        Adder.open.append(self)

    def reset(self, prompt):
        self.start = int(prompt.ground_truth or 0)
        return f"Add to {self.start}."

    async def step(self, tokens, text):
        assert TOKENIZER.decode(tokens) == text
        if Adder.away:
            Adder.away -= 1
            raise RuntimeError("the tool is away")
        if text == "hold":
            while not Adder.held.is_set():
                await asyncio.sleep(0.01)
        if text == "fail":
            raise RuntimeError("the tool is away")
        if text == "late":
            await asyncio.sleep(HANG)
        if text == "block":
            time.sleep(2.0)
        if text == "lie":
            return "no turn"
        if text in ODD:
            return Turn(ODD[text])
        self.told.append(sum(map(int, filter(str.isdigit, text))))
        total = self.start + sum(self.told)
        return Turn(f"It is {total}.", reward=float(total), done=total > 9, logged=LOGGED)

    def close(self):
        Adder.open.remove(self)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(environment_hosts, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(environment_hosts, "FIRST_SECONDS", 0.2)
    Adder.open.clear()
    Adder.held.clear()


def prompt(truth, **extra):
    return dataclasses.replace(prompt_of(3, [1, 2]), ground_truth=truth, extra_info=extra)


def environments(seconds=HANG, retries=1):
    limits = CallLimits(seconds, retries, max_infra_rate=1.0)
    return Environments(f"{HERE}:Adder", {}, TOKENIZER, calls=limits)


@contextlib.contextmanager
def hosting(silent=HANG, **limits):
    """A host, and its address."""
    host = EnvironmentHost(environments(**limits), silent)
    with contextlib.closing(host):
        yield host, host.listen("127.0.0.1:0", TOKEN)


class Worker:
    """A worker's responses, whose environments run on hosts."""

    def __init__(self, **limits):
        self.environments = environments(**limits)
        self.hosts = EnvironmentHosts(self.environments.loop, "worker-1", TOKEN, HANG)
        self.environments.run_elsewhere(self.hosts.make)
        self.answers = queue.SimpleQueue()
        self.failed = []

    def begin(self, truth="2", **extra):
        """The handle of a response, which is reset."""
        handle = EnvironmentHandle(self.environments, prompt(truth, **extra), self.answers)
        handle.reset()
        return handle

    def next(self):
        """The outcome of the next call in the end; the causes of tries before are kept."""
        while isinstance(outcome := self.environments.loop.take(self.answers), object):
            if isinstance(outcome.outcome, Observed) or outcome.last:
                return outcome.outcome
            self.failed.append(outcome.outcome)

    def close(self):
        self.environments.close()
        self.hosts.close()


@pytest.fixture
def worker():
    with contextlib.closing(Worker()) as one:
        yield one


def text_of(observed):
    return TOKENIZER.decode(observed.tokens)


def step(handle, text):
    handle.step(TOKENIZER.encode(text))


# -- frames ----------------------------------------------------------------------------------------


OBSERVATIONS = [
    None,
    "It is 5, café.",
    [4, 5, 6],
    np.array([7, 8], np.int64),
    [],
    Shown("no picture"),
    Shown("<image> and <image>", [PICTURE, PICTURE[:2]], role="user"),
]


@pytest.mark.parametrize("observation", OBSERVATIONS, ids=str)
@pytest.mark.parametrize("turn", [None, (0.0, False, {}), (-1.5, True, LOGGED)])
def test_what_an_environment_returns_crosses_the_wire_as_it_is(observation, turn):
    value = observation if turn is None else Turn(observation, *turn)
    sent = answers_frame([(7, returned(value), True), (8, returned("other"), False)])
    answer, other = answers_of(Frame.of_bytes(sent.to_bytes()))
    assert (answer.number, answer.repeatable) == (7, True)
    assert (other.number, other.repeatable, other.outcome) == (8, False, "other")
    found = answer.outcome
    if turn is not None:
        assert (found.reward, found.done, found.logged) == turn
        found = found.observation
    if isinstance(observation, Shown):
        assert (found.text, found.role) == (observation.text, observation.role)
        for one, before in zip(found.images, observation.images, strict=True):
            np.testing.assert_array_equal(one, before)
            assert one.dtype == np.uint8
    elif observation is None or isinstance(observation, str):
        assert found == observation
    else:
        np.testing.assert_array_equal(found, observation)


def test_calls_cross_the_wire():
    row = prompt("17")
    calls = [
        EnvironmentCall(1, 4, row),
        EnvironmentCall(2, 5, np.array([9, 8], np.int32)),
        EnvironmentCall(0, 6, None),
    ]
    reset, turn, end = calls_of(Frame.of_bytes(calls_frame(calls).to_bytes()))
    assert (reset.number, reset.place, reset.value.ground_truth) == (1, 4, "17")
    np.testing.assert_array_equal(reset.value.tokens, row.tokens)
    assert (turn.number, turn.place, turn.value.tolist()) == (2, 5, [9, 8])
    assert (end.place, end.value) == (6, None)


@pytest.mark.parametrize(
    "returned, why",
    [
        ({}, "KeyError"),
        (3, "TypeError"),
        ({"text": 3}, r"text is 3, where str or NoneType"),
        ({"text": "x", "reward": "1", "done": False, "logged": {}}, "reward is '1'"),
        ({"text": "x", "reward": True, "done": False, "logged": {}}, "reward is True"),
        ({"text": "x", "reward": 1.0, "done": 0, "logged": {}}, "done is 0, where bool"),
        ({"text": "x", "reward": 1.0, "done": True, "logged": [1]}, "logged is"),
        ({"text": "x", "reward": 1.0, "done": True, "logged": {"a": None}}, "a is None"),
        ({"text": "x", "role": 3, "pictures": 0}, "role is 3"),
        ({"text": "x", "role": None, "pictures": "2"}, "pictures is '2'"),
        ({"text": "x", "role": None, "pictures": 10**18}, "KeyError"),
    ],
)
def test_garbage_in_the_place_of_what_was_returned_is_named(returned, why):
    told = Frame({"returned": returned}).to_bytes()
    (answer,) = answers_of(answers_frame([(7, told, False)]))
    with pytest.raises(ValueError, match=why):
        raise answer.outcome


@pytest.mark.parametrize("failure", [["away", "a", "b"], ["raised", 3, "b"], ["raised"], 3, None])
def test_garbage_in_the_place_of_a_failure_is_an_error(failure):
    told = Frame({"failure": failure}).to_bytes()
    (answer,) = answers_of(answers_frame([(7, told, False)]))
    assert isinstance(answer.outcome, ValueError)


def test_an_outcome_that_is_no_frame_fails_its_own_call_alone():
    sent = answers_frame([(7, b"=", False), (8, returned("x"), False)])
    broken, sound = answers_of(Frame.of_bytes(sent.to_bytes()))
    assert isinstance(broken.outcome, ValueError) and sound.outcome == "x"


@pytest.mark.parametrize("answers", [3, [3], [{}], [{"call": "7", "repeatable": False}]])
def test_answers_that_name_no_call_are_no_frame(answers):
    with pytest.raises(ValueError):
        answers_of(Frame({"answers": answers}))


# -- calls -----------------------------------------------------------------------------------------


def test_a_response_is_answered_by_a_host(worker):
    with hosting() as (_, address):
        worker.hosts.meet({"one": address})
        handle = worker.begin()
        assert text_of(worker.next()) == "Add to 2."
        step(handle, "and 3")
        found = worker.next()
        assert (text_of(found), found.reward, found.done) == ("It is 5.", 5.0, False)
        assert found.logged == LOGGED and len(Adder.open) == 1
        step(handle, "6")
        assert worker.next().done
        handle.close()
        until(lambda: not Adder.open)
    assert not worker.failed


def test_many_calls_are_under_way_by_two_threads(worker):
    with hosting() as (_, address):
        worker.hosts.meet({"one": address})
        handles = [worker.begin(str(n)) for n in range(200)]
        assert {text_of(worker.next()) for _ in handles} == {f"Add to {n}." for n in range(200)}
        for handle in handles:
            step(handle, "hold")
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("environment-host-") for name in names) == 2
        Adder.held.set()
        assert {worker.next().reward for _ in handles} == set(range(200))


def test_errors_and_late_answers_of_a_host_are_those_of_the_environment():
    with hosting(seconds=0.3) as (_, address), contextlib.closing(Worker(seconds=0.3)) as worker:
        worker.hosts.meet({"one": address})
        for text, cause, why in [
            ("fail", "raised", r"step raised RuntimeError: the tool is away \(.*_hosts.py, line"),
            ("late", "timed_out", "step gave no answer within rollout.environment_timeout=0.3"),
            ("lie", "raised", r"step returned 'no turn' \(str\), not a Turn"),
        ]:
            handle = worker.begin()
            worker.next()
            step(handle, text)
            failed = worker.next()
            assert failed.cause == cause and len(worker.failed) == 1, failed
            with pytest.raises(AssertionError, match=why):
                raise AssertionError(failed.error)
            worker.failed.clear()
            handle.close()


def test_the_death_of_a_host_moves_its_responses_to_another_with_their_turns(worker, caplog):
    caplog.set_level(logging.WARNING)
    with hosting() as (_, left):
        with hosting() as (_, address):
            worker.hosts.meet({"first": address})
            handle = worker.begin()
            worker.next()
            step(handle, "3")
            worker.next()
            worker.hosts.meet({"first": address, "second": left})
            step(handle, "hold 4")
        found = worker.next()  # the first one has ended
        assert (text_of(found), found.reward) == ("It is 9.", 9.0)
        causes = [failure.cause for failure in worker.failed]
        assert causes == ["host_lost"]
        assert "host first of environments is lost" in worker.failed[0].error
        worker.environments.failures.count("step", worker.failed[0])
        assert "host first of environments is lost" in caplog.text
        handle.close()
        until(lambda: not Adder.open)


def test_an_interpreter_moves_with_its_response(monkeypatch):
    """The sandbox of another host is given the code so far."""
    limits = CallLimits(HANG, 1, max_infra_rate=1.0)
    monkeypatch.setitem(
        globals(), "environments", lambda: Environments("python", {}, TOKENIZER, calls=limits)
    )
    with hosting() as (_, left), contextlib.closing(Worker()) as worker:
        with hosting() as (_, address):
            worker.hosts.meet({"first": address})
            handle = worker.begin()
            worker.next()
            step(handle, "<tool>x = [20]</tool>")
            assert text_of(worker.next()) == "<result></result>"
            worker.hosts.meet({"first": address, "second": left})
        step(handle, "<tool>x.append(1); x</tool>")  # the first one has ended
        assert text_of(worker.next()) == "<result>[20, 1]</result>"
        assert [failure.cause for failure in worker.failed] == ["host_lost"]
        handle.close()


@pytest.mark.parametrize("told", [False, True])
def test_responses_wait_for_a_host(worker, caplog, told):
    caplog.set_level(logging.WARNING)
    with hosting() as (_, gone):
        pass
    worker.hosts.meet({"gone": gone} if told else {})
    handle = worker.begin()
    until(lambda: "no host of environments" in caplog.text)
    why = f"answers, .*; open the port of {gone} to this" if told else "is at work, .*; start one:"
    assert re.search(f"no host of environments {why}", caplog.text) and worker.answers.empty()
    with hosting() as (_, address):
        worker.hosts.meet({"new": address})
        assert text_of(worker.next()) == "Add to 2."
        handle.close()
    assert not worker.failed


class Mortal:
    """One host of a worker at a time, and each has a name of its own."""

    def __init__(self, worker):
        self.worker, self.number, self.files = worker, 0, contextlib.ExitStack()

    def renew(self):
        """Ends the host, if there is one, and starts another."""
        self.files.close()
        until(lambda: not Adder.open)
        _, address = self.files.enter_context(hosting())
        self.number += 1
        self.worker.hosts.meet({str(self.number): address})


@pytest.fixture
def mortal(worker):
    host = Mortal(worker)
    host.renew()
    with contextlib.closing(host.files):
        yield host


def test_a_lost_host_uses_up_no_try(worker, mortal):
    handle = worker.begin()
    assert text_of(worker.next()) == "Add to 2."
    for reward in (3.0, 4.0, 5.0, 6.0):
        mortal.renew()
        step(handle, "1")
        assert worker.next().reward == reward
    assert [failure.cause for failure in worker.failed] == 4 * ["host_lost"]
    assert len(worker.failed) > 1 + worker.environments.calls.retries


def test_a_turn_that_ends_its_hosts_is_given_up(worker, mortal):
    handle = worker.begin()
    worker.next()
    step(handle, "hold")
    ends = 2 + 1 + worker.environments.calls.retries
    for _ in range(ends):
        until(lambda: Adder.open)
        mortal.renew()
    assert worker.next().cause == "host_lost" and len(worker.failed) == ends - 1


def test_an_object_that_was_given_a_part_of_the_turns_is_not_asked_again(
    worker, mortal, monkeypatch
):
    """Though it is repeatable: it has another state."""
    monkeypatch.setattr(Adder, "repeatable", True)
    handle = worker.begin()
    for digit in "12":
        worker.next()
        step(handle, digit)
    assert worker.next().reward == 5.0
    monkeypatch.setattr(Adder, "away", 1)  # of the first turn, which the new host is given
    mortal.renew()
    step(handle, "3")
    assert worker.next().reward == 8.0
    assert [failure.cause for failure in worker.failed] == ["host_lost", "raised"]
    handle.close()
    until(lambda: not Adder.open)


# -- sizes -----------------------------------------------------------------------------------------


def test_rows_of_many_bytes_arrive(worker):
    """More than a worker may send to trainers, in one frame."""
    handles = [worker.begin(story="t" * 600_000) for _ in range(16)]
    with hosting() as (_, address):
        worker.hosts.meet({"one": address})
        assert all(isinstance(worker.next(), Observed) for _ in handles)
    assert not worker.failed


def test_long_texts_are_encoded_beside_the_event_loop(worker, monkeypatch):
    """Of a host, and of the worker."""
    places, encode = [], Tokenizer.encode

    def noted(tokenizer, text):
        places.append((len(text) > 1000, threading.current_thread().name))
        return encode(tokenizer, text)

    with hosting() as (_, address):
        worker.hosts.meet({"one": address})
        handle = worker.begin()
        worker.next()
        monkeypatch.setattr(Tokenizer, "encode", noted)
        step(handle, "long")
        assert len(worker.next().tokens) == 3 * len(ODD["long"])
    assert sorted(places) == [(False, "MainThread"), (True, "step"), (True, "step")]


def test_an_answer_has_at_most_so_many_bytes_of_texts_and_failures(monkeypatch):
    monkeypatch.setattr(environment_host, "ANSWER_BYTES", 1000)
    failure = failed(CallFailure("raised", "x" * 900, "kind"))
    with contextlib.closing(environments()) as beside:
        session = environment_host._Session(beside)
        session._ended += [
            (n, data, False) for n, data in enumerate([returned("x" * 900), failure] * 2)
        ]
        for numbers in ([0, 1], [2, 3]):
            session.ask(answer := Future(), HANG)
            found = answers_of(Frame.of_bytes(answer.result(0)))
            assert [one.number for one in found] == numbers


def test_a_text_of_many_bytes_crosses_the_wire():
    text = "x" * (5 << 20)  # more than a worker may send to trainers
    sent = answers_frame([(7, returned(text), True)])
    assert answers_of(Frame.of_bytes(sent.to_bytes()))[0].outcome == text


@pytest.mark.parametrize("text, why", [("empty", ""), ("huge", "an observation of 1311")])
def test_each_observation_is_sent_or_fails(worker, monkeypatch, text, why):
    """One that is empty, of a type that no frame has, is as beside the sampler."""
    monkeypatch.setattr(environment_frames, "MOST_BYTES", 1 << 17)
    with hosting() as (_, address):
        worker.hosts.meet({"one": address})
        handle = worker.begin()
        worker.next()
        step(handle, text)
        found = worker.next()
        if why:
            assert found.cause == "raised" and why in found.error, found
            step(handle, "3")
            found = worker.next()
        assert isinstance(found, Observed)


def test_rows_that_cannot_be_sent_fail_alone(worker, monkeypatch):
    monkeypatch.setattr(environment_hosts, "MOST_BYTES", 1 << 20)
    with hosting() as (_, address):
        worker.hosts.meet({"one": address})
        for extra, why in [
            ({"tags": {1, 2}}, "extra_info of row 3 .* of type set"),
            ({"story": "x" * (1 << 20)}, "row 3 of the data has 1048[0-9]* bytes"),
        ]:
            worker.begin(**extra)
            failure = worker.next()
            assert failure.cause == "raised" and re.search(why, failure.error), failure
        worker.begin()
        assert text_of(worker.next()) == "Add to 2."


def test_a_host_that_is_lost_again_is_told_once_a_minute(worker, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)

    def lose():
        host = until(lambda: worker.hosts._hosts.get("one"))
        worker.environments.loop.soon(worker.hosts.lose, host, "it is away")
        until(lambda: host.lost)

    with hosting() as (_, address):
        worker.hosts.meet({"one": address})
        for seconds, told in [(0.0, 2), (60.0, 3)]:
            monkeypatch.setattr(environment_hosts, "TELL_SECONDS", seconds)
            lose()
            lose()
            assert caplog.text.count("host one of environments does not answer") == told
    worker.hosts.meet({})
    until(lambda: not worker.hosts._lost)


def test_objects_of_a_worker_that_is_silent_are_closed():
    with hosting(silent=0.5) as (_, address):
        one = Worker()
        one.hosts.meet({"one": address})
        one.begin()
        one.next()
        assert len(Adder.open) == 1
        one.environments.loop.soon(
            list(one.hosts._hosts.values())[0]._talk._wire.close
        )  # it has died
        until(lambda: not Adder.open)
        one.close()


def test_a_host_whose_environment_blocks_its_loop_says_so():
    with hosting(seconds=0.3) as (host, address), contextlib.closing(Worker()) as worker:
        worker.hosts.meet({"one": address})
        handle = worker.begin()
        worker.next()
        step(handle, "block")

        def check():
            host._next_check = 0.0
            host.check()

        with pytest.raises(EnvironmentsFailed, match="blocked the event loop"):
            until(check)


def test_a_stranger_s_calls_and_garbage_are_refused():
    with hosting() as (_, address):
        client = WireClient(address, TOKEN, "worker-2")
        with contextlib.closing(client):
            calls = calls_frame([EnvironmentCall(1, 1, prompt("2"))])
            answer = Frame.of_bytes(client.call(CALL, calls.to_bytes(), HANG))
            assert answer.facts["unknown"] and not Adder.open
            for frame in (Frame({}), Frame({"calls": [{"call": 1, "object": "x"}], "images": []})):
                with pytest.raises(Refused):
                    client.call(CALL, frame.to_bytes(), HANG)


# -- task buffers ----------------------------------------------------------------------------------


def hosts_of(folder):
    """Hosts of which a sampler hears that joins now; None: the run has none."""
    links = Joining(str(folder), "sampler", TABLES).first(HANG)
    links.close()
    return links.hosts


def test_samplers_hear_from_task_buffers_where_hosts_are(tmp_path):
    trainers = Trainers(tmp_path, exact=False, lease=1.0, served=[ENVIRONMENT])
    assert hosts_of(tmp_path) == {}
    nodes = NodeRunner(beside=[ENVIRONMENT])
    nodes.address = "127.0.0.1:7"
    joining = Joining(str(tmp_path), "host", TABLES, nodes.nodes, everywhere=True)
    state = WorkerState(links=joining.first(HANG))
    client = BufferClient(state, joining, nodes, save_seconds=0.0, orphan_seconds=HANG)

    def are(wanted):
        trainers.look()
        return hosts_of(tmp_path) == wanted

    with client.serving():
        until(lambda: are({"host": "127.0.0.1:7"}))
        first = heard(trainers)

        def lives():  # its questions are signs of life
            assert are({"host": "127.0.0.1:7"})
            return heard(trainers) > first + 2.0  # twice a lease's time

        until(lives)
    until(lambda: are({}))
    for server in trainers.servers:
        server.close()


def heard(trainers):
    """When all task buffers have heard of the host."""
    return min(requests.buffer.workers["host"] for requests in trainers.requests)


def test_a_run_without_hosts_names_none_and_takes_none(tmp_path):
    trainers = Trainers(tmp_path, exact=False)
    assert hosts_of(tmp_path) is None
    with pytest.raises(ValueError, match="the trainers run node 'environment' themselves"):
        Joining(str(tmp_path), "host", TABLES, [ENVIRONMENT]).first(HANG)
    for server in trainers.servers:
        server.close()


def test_a_host_s_address_is_one(tmp_path):
    trainers = Trainers(tmp_path, exact=False, served=[ENVIRONMENT])
    links = Joining(str(tmp_path), "host", TABLES, [ENVIRONMENT]).first(HANG)
    for address in ("nonsense", "a b:3", 7):
        asked = Frame({"capacity": 1, "nodes": [ENVIRONMENT], "address": address})
        with pytest.raises(Refused, match="address"):
            links.call(links.clients[0], "lease_node", asked)
    links.close()
    for server in trainers.servers:
        server.close()


def test_a_failure_s_record_crosses_the_wire():
    failure = CallFailure("raised", "step raised\ntrace", "step, RuntimeError")
    (answer,) = answers_of(answers_frame([(1, failed(failure), True)]))
    assert answer.outcome == failure and answer.repeatable
