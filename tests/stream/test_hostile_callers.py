"""Frames of one who holds the run's token, of any types and sizes: none ends or slows a run."""

import logging
import math
import time

import numpy as np
import pytest
from support.counted_buffers import TABLES, request_of
from support.task_buffer_calls import LEASE, Buffer

from distflow_jax.coordinator.column_codec import encode
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.stream.border import MOST_RESPONSES
from distflow_jax.stream.frames.frames import MOST_ARRAYS, TOLD_BYTES, Frame
from distflow_jax.stream.links.waiting_questions import MOST_QUESTIONS
from distflow_jax.stream.tasks import Key
from distflow_jax.stream.wire.calls import Refused

DEEP: list = []
for _ in range(900):
    DEEP = [DEEP]
VALUES = [
    *([], [1], {}, {"a": 1}, {"seed": {"x": []}}, 10**30, -5, 10**18, math.nan, math.inf, None),
    *(True, "x", "", "\ud800", "a\n2026 ERROR forged\x1b[2J", 1.5, DEEP, [[-1, "gen"]]),
    *([f"n{i}" for i in range(1000)], [[10**400, "x"]], [["4", "gen"]], [[4, "gen"]] * 3),
]
FACTS = [
    *("attempt", "version", "capacity", "slots", "idle", "waits", "samples", "nodes", "keys"),
    *("goes_on", "spent", "why", "config", "node_config", "columns", "numbers", "parts"),
]
METHODS = ["register", "lease", "lease_node", "submit", "submit_node", "fail", "assign"]
KEY: Key = (4, "gen")


@pytest.mark.parametrize("method", [*METHODS, "deregister"])
def test_no_value_of_any_type_is_a_fault(method, caplog):
    """Each is answered or refused, and an honest worker gets its group afterwards."""
    for name in FACTS:
        for value in VALUES:
            buffer = Buffer()
            buffer.requests.begin(KEY, request_of(4), Progress())
            facts = {**LEASE, **TABLES, "keys": [list(KEY)], "nodes": ["score"]}
            try:
                buffer.service.methods()[method]("liar", Frame(facts | {name: value}).to_bytes())
            except Refused:
                pass
            buffer.tasks.expire(time.monotonic())
            buffer.look(30.0)
            assert set(buffer.tasks._serving) <= {"", "(evaluation)", "score"}
            assert not buffer.tasks.given_up
            buffer.tasks.deregister("liar")
            assert Frame.of_bytes(buffer.call("honest")).facts["keys"] == [list(KEY)]
    for record in caplog.records:
        text = record.getMessage()
        assert "liar" in text and text.isprintable() and len(text) < 600


def test_a_node_that_no_worker_runs_is_refused_where_it_is_asked_for():
    with pytest.raises(Refused, match="the trainers run node 'n0' themselves"):
        Buffer().call("liar", "lease_node", nodes=["n0"])


def test_a_reason_is_told_once_and_by_a_worker_that_is_there(caplog):
    caplog.set_level(logging.WARNING)
    buffer = Buffer()
    for _ in range(3):
        buffer.call("stranger", "deregister", why="x")
    assert not caplog.records and not buffer.tasks.unfit
    buffer.call("worker", "register", **TABLES)
    for _ in range(3):
        buffer.call("worker", "deregister", why="a\nforged \ud800" + "x" * 9999)
    (record,) = caplog.records
    assert record.getMessage().startswith("worker worker has ended: a forged \\ud800xxx")
    assert buffer.tasks.unfit


def samples_frame(keys, rows):
    """A frame of responses, each of no token, to prompts that nobody asks for."""
    index = np.zeros((rows, 10), np.int64)
    index[:, 0] = np.arange(rows) % len(keys) + keys[0][0]
    arrays = {"index": index, "experts": np.zeros(0, np.int32), "reward": np.zeros(rows)}
    arrays["logged"] = np.frombuffer(("[" + ",".join(["{}"] * rows) + "]").encode(), np.uint8)
    for name, kind in [("tokens", np.int32), ("logp", np.float32), ("margin", np.float32)]:
        arrays[name] = np.zeros(0, kind)
    arrays |= {"version": np.zeros(0, np.int32), "fed": np.zeros(0, np.int32)}
    arrays["mask"] = np.zeros(0, bool)
    return Frame({"attempt": "one", "spent": [0.0] * 7, "keys": keys, "nodes": ["gen"]}, arrays)


def test_as_many_keys_and_responses_as_a_frame_holds_leave_nothing():
    """In a second; if each response looked through all keys it would take minutes."""
    buffer = Buffer()
    keys = [[9 + n, "gen"] for n in range(MOST_RESPONSES)]
    found = buffer.service.methods()["submit"]("liar", samples_frame(keys, len(keys)).to_bytes())
    assert len(Frame.of_bytes(found).facts["dropped"]) == len(keys)
    with buffer.lock:  # nothing of it stays
        assert not buffer.tasks.groups()


def test_one_response_more_than_a_frame_holds_is_refused(caplog):
    frame = samples_frame([[9, "gen"]], MOST_RESPONSES + 1)
    Buffer().service.methods()["submit"]("liar", frame.to_bytes())
    assert f"worker liar is refused: {MOST_RESPONSES + 1} responses in a frame" in caplog.text


def told(size):
    return encode([np.full(size, ord("["), np.uint8)], "")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (told(1) + b"=" * (1 << 20), f"more than {MOST_ARRAYS} entries"),
        (told(TOLD_BYTES + 1), f"{TOLD_BYTES + 1} bytes of JSON values"),
        (told(100_000), "cannot be read"),
    ],
    ids=["arrays of a byte", "values of a byte", "nested"],
)
def test_bytes_that_would_take_many_times_their_size_are_not_read(data, words):
    with pytest.raises(Refused, match=words):
        Buffer().service.methods()["submit"]("liar", data)


def test_questions_that_wait_are_bounded_and_others_are_told_when_to_ask():
    buffer = Buffer()
    waiting = [buffer.call(f"w{i}", waits=True) for i in range(MOST_QUESTIONS)]
    for answer in waiting:
        answer.cancel()  # their workers have gone
    for waits in (True, False):
        assert Frame.of_bytes(buffer.call("late", waits=waits)).facts["again"] > 0.09
    buffer.look(30.0)
    assert not len(buffer.service._waiting)


@pytest.mark.parametrize("method", ["lease", "lease_node", "submit", "fail", "assign"])
def test_no_method_takes_more_names_than_there_is_room_for(method):
    buffer = Buffer(most_workers=2)
    facts = {**TABLES, "keys": [], "nodes": [], "why": "x"}
    for number in range(2):
        buffer.call(f"w{number}", "assign" if method == "assign" else "lease", **facts)
    with pytest.raises(Refused, match="^2 workers talk to this trainer already"):
        buffer.call("w2", method, **facts)
    assert len(buffer.tasks.workers) <= 2 and len(buffer.service._roster) <= 2
