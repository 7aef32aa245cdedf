"""Bars of a step: what runs beside the training has lanes of its own."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from support.waiting import HANG

from distflow_jax.observe.spans import Spans, read_trace
from distflow_jax.report.read_run import PlannedNode, Span, read_run
from distflow_jax.report.sections.step_bars import step_bars

PLAN = [
    PlannedNode("rollout", "ROLLOUT", 0),
    PlannedNode("reward", "REWARD", 1),
    PlannedNode("actor_train", "ACTOR", 2),
]


def labels_of(html):
    return re.findall(r"<div class='label' title='([^']*)'", html)


def row_of(html, label):
    return next(row for row in html.split("<div class='row'>") if f"title='{label}'" in row)


def test_a_step_of_one_thread_has_no_lanes():
    spans = [Span("rollout", "", 0.0, 2.0), Span("actor_train", "", 2.0, 3.0)]
    found = labels_of(step_bars(PLAN, {1: spans}))
    assert found == ["1. rollout", "2. reward", "3. actor_train"]


def test_sampling_beside_training_has_a_lane():
    spans = [
        Span("rollout", "sampler_0", -0.5, 1.0),
        Span("rollout", "sampler_0", 1.5, 4.0),
        Span("take_weights", "sampler_0", 1.0, 1.5),
        Span("reward", "host-nodes_0", 1.0, 1.25),
        Span("wait_for_samples", "", 0.0, 1.0),
        Span("actor_train", "", 1.0, 4.0),
        Span("testing", "", 4.0, 5.0),
    ]
    html = step_bars(PLAN, {2: spans})
    assert labels_of(html) == [
        "sampling",
        "training",
        "1. rollout (sampler_0)",
        "2. reward (host-nodes_0)",
        "3. actor_train",
        "wait_for_samples",
        "evaluation",
        "take_weights (sampler_0)",
    ]
    sampling, training = row_of(html, "sampling"), row_of(html, "training")
    assert "4.000 s" in sampling and "take_weights: 1.000 s to 1.500 s" in sampling
    assert "actor_train: 1.000 s to 4.000 s" in training and "rollout" not in training


def test_lanes_from_a_trace_of_real_threads(tmp_path):
    """A sampler's spans belong to the steps beside which they ran."""
    spans, beside = Spans(tmp_path / "trace.json"), threading.Barrier(2, timeout=HANG)
    nodes = [("rollout", "ROLLOUT"), ("actor_train", "ACTOR")]
    tasks = [{"node": {"id": name, "role": role, "type": ""}, "depth": 0} for name, role in nodes]
    (tmp_path / "plan.json").write_text(json.dumps({"tasks": tasks}))

    def sample():
        with spans.span("rollout"):
            beside.wait()
            beside.wait()

    with ThreadPoolExecutor(1, thread_name_prefix="sampler") as executor:
        ended = executor.submit(sample)
        with spans.span("actor_train", step=1):
            beside.wait()
            beside.wait()
            ended.result()
    spans.close()
    assert len({e["tid"] for e in read_trace(tmp_path / "trace.json") if e["ph"] == "X"}) == 2
    run = read_run(tmp_path)
    assert labels_of(step_bars(run.plan, run.steps)) == [
        "sampling",
        "training",
        "1. rollout (sampler_0)",
        "2. actor_train",
    ]


def test_partial_batches_are_in_the_lane_of_the_training(tmp_path):
    """Of a trace as a run writes it."""
    spans = Spans(tmp_path / "trace.json")
    with spans.span("wait_for_samples", step=1, partial_batch=1):
        pass
    for partial_batch in (1, 2, 3):
        with spans.span("actor_train", step=1, partial_batch=partial_batch):
            time.sleep(0.01)
    spans.close()
    tasks = [{"node": {"id": "actor_train", "role": "ACTOR", "type": ""}, "depth": 0}]
    (tmp_path / "plan.json").write_text(json.dumps({"tasks": tasks}))
    run = read_run(tmp_path)
    html = step_bars(run.plan, run.steps)
    training = row_of(html, "training")
    assert labels_of(html) == ["training", "1. actor_train", "wait_for_samples"]
    assert re.findall(r"<i class='([^']*)'", training) == ["actor", "actor second", "actor"]
    assert "partial batch 3 of 3, actor_train: " in training
    assert (
        re.search(r"\d s in 3 partial batches", training)
        and "every second partial batch is lighter" in html
    )


def test_a_step_at_once_names_no_partial_batches():
    html = step_bars(PLAN, {1: [Span("rollout", "sampler_0", 0.0, 2.0), Span("reward", "", 1, 2)]})
    assert "partial_batch" not in html and "training" in labels_of(html)
