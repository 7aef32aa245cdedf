"""Phases tell the watchdog where a process is, and split work from waiting."""

import contextlib
import json

import numpy as np

from distflow_jax.observe.phases import Phases, straggler_report
from distflow_jax.observe.spans import Spans


class Recorder:
    def __init__(self):
        self.said = []

    def progress(self, step, phase):
        self.said.append((step, phase))


def test_waiting_is_no_work():
    spent = [0.0]
    watchdog = Recorder()
    phases = Phases(Spans(), watchdog, lambda: spent[0])
    phases.step = 3
    with phases.span("rollout"):
        spent[0] += 1000.0  # as if the body had waited for the others
    assert watchdog.said == [(3, "rollout"), (3, "after rollout")]
    with phases.span("wait"), phases.span("send"):
        pass
    assert [name for _, name in watchdog.said[2:]] == ["wait", "send", "wait", "after wait"]
    assert phases.take_work()["rollout"] < -999
    assert phases.take_work() == {}


def test_what_a_terminal_draws_is_no_time_of_a_phase(tmp_path):
    spans, order = Spans(tmp_path / "trace.json"), []

    @contextlib.contextmanager
    def shown(name):
        with spans.span("draw"):
            order.append("draw")
        yield
        with spans.span("draw"):
            order.append("draw")

    def waited():
        order.append("count")
        return 0.0

    with Phases(spans, Recorder(), waited, shown).span("rollout"):
        pass
    spans.close()
    assert order == ["draw", "count", "count", "draw"]
    found = [e for e in json.loads((tmp_path / "trace.json").read_text()) if e["ph"] == "X"]
    assert [e["name"] for e in found] == ["draw", "rollout", "draw"]


def test_report_names_the_slowest():
    report = straggler_report(["rollout", "reward"], np.array([[2.0, 0.0], [4.0, 0.0]]))
    assert report["rollout"] == {"seconds": [2.0, 4.0], "idle": [0.5, 0.0], "slowest": 1}
    assert report["reward"]["seconds"] == [0.0, 0.0]
