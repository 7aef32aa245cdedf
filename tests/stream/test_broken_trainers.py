"""A worker whose trainers answer at once by nothing: it asks no faster."""

import math
import threading

import pytest
from support.counted_buffers import Trainers, working
from support.waiting import HANG, until

from distflow_jax.stream.frames.frames import Frame
from distflow_jax.stream.links import buffer_talk
from distflow_jax.stream.links.buffer_talk import MOST_FRUITLESS
from distflow_jax.stream.wire.wire_client import WireClient


def break_answers(trainers, change):
    """Has the one task buffer answer at once, and by `change(facts)`; returns (an event after which
    it does, the methods that were called since)."""
    broken, calls, (server,) = threading.Event(), [], trainers.servers
    for name in ("lease", "submit"):

        def answer(worker, payload, name=name, method=server._methods[name]):
            found = method(worker, payload)
            if not broken.is_set():
                return found
            calls.append(name)
            if not isinstance(found, bytes):  # it would wait
                found.cancel()
                with trainers.locks[0]:
                    found = Frame(trainers.answers[0]._state(worker) | {"again": 0.0}).to_bytes()
            frame = Frame.of_bytes(found)
            return Frame(change(dict(frame.facts)), frame.arrays).to_bytes()

        server._methods[name] = answer
    return broken, calls


@pytest.mark.parametrize("again", [0.0, -1])
def test_one_that_answers_at_once_by_nothing_is_asked_at_times(tmp_path, monkeypatch, again):
    trainers = Trainers(tmp_path, exact=False, processes=1)
    broken, calls = break_answers(trainers, lambda facts: facts | {"again": again})
    (server,) = trainers.servers
    with working(tmp_path) as (worker, _, _):
        until(lambda: worker.groups > 0 and not worker.open)  # all that may begin is there
        monkeypatch.setattr(buffer_talk, "LEAST_SECONDS", HANG)
        monkeypatch.setattr(buffer_talk, "MOST_SECONDS", HANG)
        broken.set()

        def is_asked():
            with trainers.locks[0]:  # the question that waits is answered
                trainers.answers[0].answer_waiting(math.inf)
            return len(calls) > MOST_FRUITLESS // 2

        until(is_asked)
        client = WireClient(f"127.0.0.1:{server.port}", (tmp_path / "token").read_bytes(), "other")
        for _ in range(1000):
            client.call("assign", Frame({}).to_bytes(), HANG)
        client.close()
        assert len(calls) <= 3 * MOST_FRUITLESS
    trainers.close(ended=False)
