"""Workers and task buffers over real sockets, with a sampler that only counts.

Nightly: two thousand groups go between workers and task buffers over a network that delays, loses
and repeats; workers die, trainers go back: none is lost, split or trained twice; two thousand
workers that join and leave leave nothing at a task buffer.
"""

import collections
import contextlib
import dataclasses
import os
import threading
import time
import types

import numpy as np
import pytest
from support.counted_buffers import (
    GROUPS,
    LIMITS,
    STALENESS,
    TABLES,
    Trainers,
    request_of,
    response_of,
    working,
)
from support.faulty_wire import LATE, LOST, TWICE, UNANSWERED, Faults, Forwarder
from support.paths import ROOT
from support.sockets import open_files, resident_bytes, settle, threads
from support.waiting import HANG

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import single_turn
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rollout.occupancy import Occupancy
from distflow_jax.rollout.requests import Partial
from distflow_jax.stream.frames.frames import Frame, samples_frame, samples_of, work_frame, work_of
from distflow_jax.stream.links import buffer_links
from distflow_jax.stream.links import shared_tables as shared_tables_lib
from distflow_jax.stream.links.buffer_addresses import (
    BufferAddresses,
    addresses,
    forget_end,
    mark_end,
    read_addresses,
    start_before,
)
from distflow_jax.stream.links.buffer_links import Joining, deregister
from distflow_jax.stream.links.buffer_service import BufferService, difference
from distflow_jax.stream.links.run_token import make_run_token
from distflow_jax.stream.links.shared_tables import shared_tables
from distflow_jax.stream.sample_requests import HERE, SampleRequests, differs
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.tasks import pieces_of, progress_of
from distflow_jax.stream.wire.calls import Unreachable
from distflow_jax.stream.wire.wire_client import WireClient
from distflow_jax.stream.wire.wire_server import WireServer

SEED = int(os.environ.get("DISTFLOW_WORKERS_SEED", "25"))  # of the faults


def test_frames_carry_requests_and_their_samples():
    request, partial = request_of(7, turn=3), None
    chunk = (
        np.array([4, 5], np.int32),
        np.array([-0.5, -1.0], np.float32),
        np.array([0.1, 0.2], np.float32),
        np.array([1, 2], np.int32),
    )
    partial = Partial(request, 1, np.zeros(0, np.int32), [chunk])
    episode = single_turn(response_of(request, 0, [1, 1, 2]))
    key = (7, "gen")
    work = [
        (key, request, Progress({0: episode}, [partial])),
        ((9, "gen"), request_of(9), Progress()),
    ]
    frame = Frame.of_bytes(work_frame({"newest": 2}, work).to_bytes())
    (found_key, found, progress), (other, _, nothing) = work_of(frame)
    assert frame.facts["newest"] == 2 and (found_key, other) == (key, (9, "gen"))
    assert (found.turn, found.rank, found.sampling) == (3, (0.5, 1.0), request.sampling)
    np.testing.assert_array_equal(found.prompt.tokens, request.prompt.tokens)
    assert not nothing.episodes and not nothing.partials
    pieces = pieces_of(progress)
    assert [(p.tokens, p.lowest, p.highest, p.whole) for _, p in sorted(pieces.items())] == [
        (3, 1, 2, True),
        (2, 1, 2, False),
    ]
    again = samples_frame({}, {key: progress_of(pieces)})
    back = samples_of(Frame.of_bytes(again.to_bytes()), {key: request})[key]
    np.testing.assert_array_equal(back.partials[0].tokens, [4, 5])
    np.testing.assert_array_equal(back.episodes[0].response.tokens, episode.response.tokens)


@pytest.mark.parametrize("data", [b"", b"x", b"a" * 40, Frame({"keys": 3}).to_bytes()[:-5]])
def test_bytes_that_are_no_frame_are_one_kind_of_error(data):
    with pytest.raises(ValueError):
        Frame.of_bytes(data)


def test_second_results_differ_only_before_a_close_choice():
    request = request_of(0)
    one, other = (response_of(request, 0, [0, 0, 0]) for _ in range(2))
    other.tokens = other.tokens + np.array([0, 1, 1], np.int32)
    assert differs(single_turn(one), single_turn(one)) is None
    assert (
        differs(single_turn(one), single_turn(other))
        == "differs at token 1: token 1 counts, and token 2"
    )
    other.margin = np.array([1, 1e-5, 1], np.float32)
    assert differs(single_turn(one), single_turn(other)) is None
    shorter = response_of(request, 0, [0, 0])
    assert (
        differs(single_turn(one), single_turn(shorter))
        == "differs at token 2: token 2 counts, and no token"
    )


def test_a_second_result_that_differs_is_in_the_log_once(caplog):
    request, key = request_of(0), (0, "gen")
    buffer = TaskBuffer(
        Rule(GROUPS, STALENESS),
        exact=True,
        version=0,
        lease_seconds=HANG,
        max_tries=2,
        differs=differs,
    )
    requests = SampleRequests(buffer, threading.Condition())
    requests.begin(key, request, Progress())
    one, other = (response_of(request, 1, [0, 0, 0]) for _ in range(2))
    other.tokens = other.tokens + np.array([0, 40, 40], np.int32)
    for response in (one, one, other, other):
        found = {key: Progress({1: single_turn(response)})}
        requests.submit("w7", [key], found, spent=Occupancy(), goes_on=True)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "response 1 to prompt 0 differs at token 1: token 1 counts, and token 41 of w7 does not"
    )
    assert buffer.counts.differing == 2


def test_tokens_of_a_complete_group_count_once_before_its_sampler_returns_it():
    """As at a checkpoint, where a sampler of this process reports what it has and goes on."""
    request, key = request_of(0), (0, "gen")
    buffer = TaskBuffer(
        Rule(GROUPS, STALENESS), exact=False, version=0, lease_seconds=HANG, max_tries=2
    )
    requests = SampleRequests(buffer, threading.Condition())
    requests.begin(key, request, Progress())
    requests.lease(HERE, 0, capacity=9)
    episodes = {s: single_turn(response_of(request, s, [0] * 5)) for s in request.samples}
    found, tokens = {key: Progress(episodes)}, 5 * len(request.samples)
    requests.submit_here(found, tokens, Occupancy(), goes_on=True)
    assert buffer.complete and requests.under_way == tokens
    requests.submit_here({}, 0, Occupancy(), goes_on=False)
    assert requests.under_way == tokens
    requests.take_complete()
    requests.handed_on()
    assert requests.under_way == 0


def test_the_first_key_that_differs_is_named():
    ours = {"seed": "1", "rollout.top_k": "0"}
    assert difference("config", ours, dict(ours)) == ""
    text = difference("config", ours, {"seed": "1", "rollout.top_k": "5"})
    assert text.startswith("config rollout.top_k is 5 at this worker and 0 at the trainers")
    assert "missing at this worker" in difference("code", {"run.py": "a"}, {})


@contextlib.contextmanager
def buffer_with(folder, tables):
    """A task buffer whose workers must have these tables."""
    lock = threading.Condition()
    buffer = TaskBuffer(
        Rule(GROUPS, STALENESS), exact=False, version=0, lease_seconds=HANG, max_tries=2
    )
    facts = {"attempt": "one", "after": "", "began": 0, "exact": False}
    answers = BufferService(SampleRequests(buffer, lock), lock, tables, facts, limits=LIMITS)
    with contextlib.closing(
        WireServer("127.0.0.1:0", make_run_token(folder), answers.methods())
    ) as server:
        buffers = (f"127.0.0.1:{server.port}",)
        answers.meet(buffers)
        BufferAddresses("one", buffers).write(folder)
        yield buffer


def test_a_worker_with_another_tokenizer_is_refused_when_it_joins(tmp_path):
    tokenizer = Tokenizer.byte_level(300)
    unlike = dataclasses.replace(tokenizer, chat_template="{{ messages[0].content }}")
    ours, other = (shared_tables({}, {}, one) for one in (tokenizer, unlike))
    with buffer_with(tmp_path, ours) as buffer:
        with pytest.raises(ValueError, match="tokenizer of the model is .* at this worker and"):
            Joining(str(tmp_path), "w", other).first(HANG)
        assert not buffer.workers
        Joining(str(tmp_path), "w", ours).first(HANG).close()
        assert "w" in buffer.workers


def test_a_worker_agrees_on_what_sizes_the_engine_of_evaluations():
    config = {f"eval.{key}": "1" for key in ("dataset", "every", "max_response_length")}
    config["eval.columns.question"] = "1"
    shared = shared_tables(config, {}, Tokenizer.byte_level(300))["config"]
    assert shared == {"eval.max_response_length": "1"}


def test_addresses_are_written_whole_and_read_back(tmp_path):
    assert read_addresses(tmp_path) is None and start_before(tmp_path) == ""
    BufferAddresses("a1", ("127.0.0.1:5",)).write(tmp_path)
    assert read_addresses(tmp_path) == BufferAddresses("a1", ("127.0.0.1:5",), ended=False)
    assert start_before(tmp_path) == "a1"
    for text in ("{", "[" * 99999):
        (tmp_path / "task_buffers.json").write_text(text)
        assert start_before(tmp_path) == ""
        with pytest.raises(ValueError, match="not a file of servers"):
            read_addresses(tmp_path)
    assert addresses("host:1,[::1]:2") == ("host:1", "[::1]:2")
    assert addresses("runs/far") == ()
    assert addresses("./a:b") == addresses("/a:1/b") == ()
    for wrong in (
        "host:1,runs/far",
        "host:0",
        "127.0.0.1:99999",
        "a b:1",
        ":1",
        "http://a:1",
        "a:1,",
    ):
        with pytest.raises(ValueError, match="HOST:PORT"):
            addresses(wrong)


def test_nobody_who_answers_is_named(tmp_path):
    make_run_token(tmp_path)
    joining = Joining(str(tmp_path), "w", TABLES)
    with pytest.raises(ValueError, match="no trainer has opened"):
        joining.first(0.5)
    BufferAddresses("a1", ("127.0.0.1:1",)).write(tmp_path)
    with pytest.raises(ValueError, match=r"no trainer answers at 127\.0\.0\.1:1") as caught:
        joining.first(0.5)
    assert "start the worker again or wait longer with" in str(caught.value)
    assert "port and the firewall" in str(caught.value)


def test_trainers_that_take_calls_and_do_not_answer_are_named_in_time(tmp_path, monkeypatch):
    """By a clock of ours, of which each call takes all that it may."""
    now, asked = [0.0], set()

    def sleep(seconds):
        now[0] += seconds

    class Silent(WireClient):
        def call(self, method, payload, seconds):
            asked.add(self.address)
            sleep(seconds)
            raise Unreachable(self.address)

    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(buffer_links, "time", clock)
    monkeypatch.setattr(buffer_links, "WireClient", Silent)
    make_run_token(tmp_path)
    buffers = tuple(f"127.0.0.1:{port}" for port in range(1, 5))
    BufferAddresses("a1", buffers).write(tmp_path)
    with pytest.raises(ValueError, match="no trainer answers at"):
        Joining(str(tmp_path), "w", TABLES).first(2.0)
    assert now[0] < 3.0 and asked == set(buffers)


def test_the_page_on_workers_lists_the_keys_that_may_differ():
    text = (ROOT / "docs" / "workers.md").read_text(encoding="utf-8")
    for key in shared_tables_lib.OWN_KEYS:
        section, _, name = key.rpartition(".")
        assert f"`{name if section in ('rollout', 'stream') else key}`" in text, key
    for section in shared_tables_lib.OWN_SECTIONS:
        assert f"`{section}`" in text, section


def test_a_run_that_goes_on_after_its_end_is_waited_for(tmp_path):
    BufferAddresses("a1", ("127.0.0.1:1",), ended=True).write(tmp_path)
    joining = Joining(str(tmp_path), "w", TABLES)
    assert joining.first(0.1) is None
    forget_end(tmp_path)
    with pytest.raises(buffer_links.NobodyAnswers, match="has opened"):
        joining.first(0.1)
    BufferAddresses("a2", ("127.0.0.1:1",)).write(tmp_path)
    forget_end(tmp_path)  # one that was killed: workers that know its attempt keep their samples
    assert start_before(tmp_path) == "a2"


def test_a_run_that_is_finished_tells_workers_so(tmp_path):
    """Its last start may have failed after its last checkpoint."""
    mark_end(tmp_path)  # a run without workers
    assert read_addresses(tmp_path) is None
    BufferAddresses("a1", ("127.0.0.1:1",)).write(tmp_path)
    mark_end(tmp_path)
    assert read_addresses(tmp_path) == BufferAddresses("a1", ("127.0.0.1:1",), ended=True)


def test_a_worker_with_another_token_hears_so_with_one_address(tmp_path, monkeypatch):
    trainers = Trainers(tmp_path, exact=False, processes=1)
    monkeypatch.setenv("DISTFLOW_TOKEN", "x" * 32)
    address = f"127.0.0.1:{trainers.servers[0].port}"
    with pytest.raises(ValueError) as found:
        Joining(address, "w", TABLES).first(HANG)
    text = f"{address}: the token differs; set DISTFLOW_TOKEN alike on both sides"
    assert str(found.value) == text
    trainers.close(ended=False)


# -- whole jobs -------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True], ids=["in_flight", "boundary"])
def test_two_workers_answer_two_buffers_and_end_with_the_run(tmp_path, exact):
    trainers = Trainers(tmp_path, exact=exact)
    with working(tmp_path) as (one, end, _), working(tmp_path) as (two, other, _):
        trainers.train(30)
        while not (one.groups and two.groups):  # one of them had no turn until now
            trainers.train(trainers.step + 1)
        trainers.close()
        end.result(HANG)
        other.result(HANG)
    assert [c for step in sorted(trainers.trained) for c in trainers.trained[step]] == list(
        range(trainers.step * GROUPS)
    )
    assert all(r.buffer.counts.differing == 0 for r in trainers.requests)


@pytest.mark.parametrize("exact", [False, True], ids=["in_flight", "boundary"])
def test_a_worker_that_is_silent_loses_its_groups_and_one_that_stops_gives_them(tmp_path, exact):
    trainers = Trainers(tmp_path, exact=exact)
    with working(tmp_path, seconds=0.02) as (_, _, stop):
        trainers.train(3)
        with working(tmp_path) as (two, _, _):
            stop.set()
            trainers.train(10)
            assert two.groups > 0
            buffer = trainers.requests[0].buffer
            with trainers.locks[0]:  # as if it had asked before a lease's time
                buffer.lease("silent", buffer.wanted()[0], 100, time.monotonic() - HANG)
            trainers.train(14)
            trainers.close()


@pytest.mark.parametrize("exact", [False, True], ids=["in_flight", "boundary"])
def test_workers_find_trainers_that_were_started_again_at_an_older_step(tmp_path, exact):
    trainers = Trainers(tmp_path, exact=exact)
    with working(tmp_path) as (worker, end, _):
        trainers.train(5)
        trainers.close(ended=False)
        again = Trainers(tmp_path, exact=exact, step=3, position=3 * GROUPS, attempt="two")
        again.train(12)
        again.close()
        end.result(HANG)
    assert again.trained[4] == tuple(range(3 * GROUPS, 4 * GROUPS))
    assert worker.groups >= 9 * GROUPS


def test_a_worker_without_trainers_ends_after_some_time(tmp_path):
    trainers = Trainers(tmp_path, exact=False, processes=1)
    with working(tmp_path, orphan=0.5) as (_, end, _):
        trainers.close(ended=False)
        error = end.exception(HANG)
    assert "no trainer answers at" in str(error) and "--orphan_seconds" in str(error)


def test_a_prompt_on_which_workers_fail_is_given_up_and_the_next_takes_its_place(tmp_path):
    trainers = Trainers(tmp_path, exact=False)
    with working(tmp_path, refuses=(5,)), working(tmp_path, refuses=(5,)):
        trainers.train(4)
        trainers.close()
    assert trainers.given_up == {5}
    assert trainers.trained[2] == (4, 6, 7, 8) and trainers.trained[3] == (9, 10, 11, 12)


def tables_of(trainers):
    """Entries of every table of a task buffer and its server, by owner and name."""
    requests, answers = trainers.requests[0], trainers.answers[0]
    owners = [answers, requests, requests.buffer]
    kinds = (dict, set, list)
    return [{n: len(v) for n, v in vars(one).items() if isinstance(v, kinds)} for one in owners]


def joined(folder, count):
    """Workers join, claim what they can get, and leave or vanish, one after the other."""
    trainers = Trainers(folder, exact=False, processes=1)
    (requests,), (lock,), before = trainers.requests, trainers.locks, tables_of(trainers)
    for number in range(count):
        nodes = ["score"] if number % 4 == 0 else []
        links = Joining(str(folder), f"w{number}", TABLES, nodes).first(HANG)
        told = {"version": 0, "capacity": 4, "slots": 4, "nodes": nodes}
        links.call(links.clients[0], "lease_node" if nodes else "lease", Frame(told))
        if number % 2:
            deregister(links)
        links.close()
    with lock:
        now = time.monotonic()
        for late in (0.0, 2 * HANG, 100 * HANG):  # of leases of HANG seconds
            requests.buffer.expire(now + late)
        requests.buffer.moves.clear()  # as each look at the buffer does
    assert tables_of(trainers) == before
    settle(lambda: trainers.servers[0].peers, 0)
    trainers.close()


def test_workers_that_join_and_leave_leave_nothing_at_a_buffer(tmp_path):
    joined(tmp_path, 3)
    before = threads(), open_files()
    joined(tmp_path, 60)
    settle(threads, before[0])
    settle(open_files, before[1])


@pytest.mark.slow
def test_two_thousand_workers_that_join_and_leave_leave_nothing_at_a_buffer(tmp_path):
    """Neither tables, threads, files nor memory (stream/task_buffer.py,
    stream/links/buffer_service.py)."""
    joined(tmp_path, 400)
    before = threads(), open_files(), resident_bytes()
    joined(tmp_path, 2000)
    settle(threads, before[0])
    settle(open_files, before[1])
    assert resident_bytes() < 1.02 * before[2]


class Crew:
    """Workers behind a faulty network, of which one is killed now and then and another joins."""

    def __init__(self, folder, faults):
        self._folder, self._faults = folder, faults
        self._working, self._number, self.killed = {}, 0, []

    def join(self):
        name = f"w{self._number}"
        self._number += 1
        made = working(self._folder, seconds=0.01, orphan=60.0, name=name)
        self._working[name] = made, made.__enter__()

    def kill(self):
        """SIGKILL as the task buffers see it: nothing comes from it any more."""
        name = list(self._working)[int(self._faults.uniform(0, len(self._working)))]
        made, (_, _, stop) = self._working.pop(name)
        self._faults.kill(name)
        stop.set()
        self.killed.append(made)

    def end(self):
        """Ends all workers; raises the error of one that was not killed."""
        for _, (_, _, stop) in self._working.values():
            stop.set()
        for made, (_, end, _) in self._working.values():
            made.__exit__(None, None, None)
            end.result(0)
        for made in self.killed:
            made.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["in_flight", "boundary"])
def test_two_thousand_groups_over_a_faulty_network(tmp_path, monkeypatch, exact):
    """Frames are lost and come twice, workers are killed, trainers go back to older steps."""
    faults, steps = Faults(SEED), 2000 // GROUPS
    print(f"seed {SEED}")
    monkeypatch.setattr(buffer_links, "WireClient", faults.client)
    with contextlib.ExitStack() as stack:

        def through(port):
            return stack.enter_context(contextlib.closing(Forwarder(port, faults))).port

        crew = Crew(tmp_path, faults)
        stack.callback(crew.end)
        trainers = Trainers(tmp_path, exact=exact, through=through, lease=0.5)
        for _ in range(4):
            crew.join()
        trained, seen = {}, collections.Counter()
        restarts = [steps // 3, 2 * steps // 3]
        next_kill, end = time.monotonic() + 1, time.monotonic() + HANG
        while trainers.step < steps:
            assert time.monotonic() < end, f"stands at step {trainers.step}"
            trainers.look()
            if time.monotonic() >= next_kill:
                next_kill = time.monotonic() + faults.uniform(1, 4)
                crew.kill()
                crew.join()
            if restarts and trainers.step >= restarts[0]:
                restarts.pop(0)
                older = trainers.step - 2
                trained |= trainers.trained
                seen += counts_of(trainers)
                trainers.close(ended=False)
                trainers = Trainers(
                    tmp_path,
                    exact=exact,
                    step=older,
                    position=older * GROUPS,
                    attempt=f"from {older}",
                    through=through,
                    lease=0.5,
                )
            time.sleep(0.002)
        trained |= trainers.trained
        seen += counts_of(trainers)
    trainers.close(ended=False)
    print(dict(faults.done), f"{len(crew.killed)} killed", dict(seen))
    assert [c for step in range(1, steps + 1) for c in trained[step]] == list(range(2000))
    assert not trainers.given_up and seen["differing"] == 0
    assert min(faults.done[kind] for kind in (LOST, UNANSWERED, TWICE, LATE, "broken")) > 0
    assert len(crew.killed) >= 3 and seen["second"] > 0 and seen["expired"] > 0


def counts_of(trainers):
    """Counts of all task buffers."""
    buffers = [requests.buffer for requests in trainers.requests]
    found = [dataclasses.asdict(b.counts) | {"expired": b.expired} for b in buffers]
    return sum(map(collections.Counter, found), collections.Counter())
