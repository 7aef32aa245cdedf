"""Times by span add up, in traces that viewers accept, also after a kill."""

import json
import threading
import time
import types

import pytest
from support.trace_rules import check_trace

from distflow_jax.observe import spans as spans_module
from distflow_jax.observe.spans import Spans, read_trace


def complete(events):
    return [event for event in events if event["ph"] == "X"]


def test_times_add_up_by_name_and_start_anew_after_take(monkeypatch):
    now = [0]  # nanoseconds
    clock = types.SimpleNamespace(time_ns=time.time_ns, perf_counter_ns=lambda: now[0])
    monkeypatch.setattr(spans_module, "time", clock)
    spans = Spans()
    for _ in range(2):
        with spans.span("gen"):
            now[0] += 20_000_000
    ended = [spans.waiting("reward") for _ in range(3)]
    now[0] += 20_000_000
    for end in ended:
        end()
    assert spans.take() == pytest.approx({"gen": 0.04, "reward": 0.06})
    assert spans.take() == {}


def test_a_span_ends_with_an_exception():
    spans = Spans()
    with pytest.raises(KeyError), spans.span("gen"):
        raise KeyError
    assert "gen" in spans.take()


def test_trace_is_chrome_json(tmp_path):
    path = tmp_path / "trace.json"
    before = time.time() * 1e6
    spans = Spans(path, process_index=3)
    with spans.span("outer", step=1), spans.span("inner"):
        pass
    after = time.time() * 1e6
    spans.close()
    outer, inner = complete(json.loads(path.read_text()))
    assert (inner["name"], outer["name"], outer["args"]) == ("inner", "outer", {"step": 1})
    assert outer["pid"] == 3
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert before - 1e6 < outer["ts"] < after + 1e6  # clocks of two kinds


def test_each_thread_has_its_own_row(tmp_path):
    spans = Spans(tmp_path / "trace.json")

    alive = threading.Barrier(4)  # the system may give an ended thread's number to the next

    def work():
        for _ in range(50):
            with spans.span("work"):
                alive.wait()

    threads = [threading.Thread(target=work, name=f"reader {i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.close()
    events = read_trace(tmp_path / "trace.json")
    assert len(complete(events)) == 200
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == [f"reader {i}" for i in range(4)]
    assert {e["tid"] for e in complete(events)} == set(names)


def test_a_killed_run_leaves_a_readable_trace_that_goes_on(tmp_path):
    path = tmp_path / "trace.json"
    spans = Spans(path)
    with spans.span("first"):
        pass
    spans.take()  # and no close
    with path.open("a") as file:
        file.write('{"name": "torn", "ph"')
    assert [e["name"] for e in complete(read_trace(path))] == ["first"]
    for name in ("second", "third"):
        spans = Spans(path)
        with spans.span(name):
            pass
        spans.close()
    names = [event["name"] for event in complete(json.loads(path.read_text()))]
    assert names == ["first", "second", "third"]


def test_a_trace_of_several_threads_is_one_that_viewers_accept(tmp_path):
    path = tmp_path / "trace.json"
    spans = Spans(path)

    def work():
        for _ in range(50):
            time.sleep(0.001)
            with spans.span("outer"), spans.span("middle"):
                with spans.span("inner"):
                    ends.append(spans.waiting("score"))
                for _ in range(2):
                    with spans.span("inner"):
                        pass
            ends.pop(0)()  # one that any thread began

    ends = [spans.waiting("score") for _ in range(20)]
    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.005)
        spans.take()
    for thread in threads:
        thread.join()
    for end in ends:
        end()
    spans.close()
    events = json.loads(path.read_text())
    check_trace(events)
    assert len(complete(events)) == 4 * 50 * 5


def test_waiting_is_no_span_of_a_thread(tmp_path):
    spans = Spans(tmp_path / "trace.json")
    ends = [spans.waiting("score", sample=i) for i in range(3)]
    with spans.span("gen"):
        ends[1]()
        ends[0]()
    ends[2]()
    spans.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    check_trace(events)
    assert [e["name"] for e in complete(events)] == ["gen"]
    assert [e["ph"] for e in events if e["name"] == "score"] == ["b"] * 3 + ["e"] * 3
    assert len({e["id"] for e in events if e["name"] == "score"}) == 3
