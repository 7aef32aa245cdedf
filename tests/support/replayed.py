"""The parts of a replay that equal its recording."""

import re

import compare_checkouts

from distflow_jax.observe.spans import read_trace
from distflow_jax.report.run_writer import read_metrics
from support.run_folders import json_lines


def partial_batches_of(folder):
    rows = json_lines(folder / "partial_batches.jsonl")
    return [{name: value for name, value in row.items() if name != "waited"} for row in rows]


def check_equal(recorded, replayed, steps):
    """The same partial batches, metrics, samples and parameters; nothing was sampled."""
    assert not list(compare_checkouts.differences(recorded, replayed, 0))
    assert [row["step"] for row in read_metrics(replayed / "metrics.jsonl")] == [
        *range(1, steps + 1)
    ]
    assert partial_batches_of(recorded) == partial_batches_of(replayed)
    names = {event["name"] for event in read_trace(replayed / "trace.json")}
    assert "actor_train" in names
    assert not names & {"rollout", "reward", "compile_sampler", "update_weights"}
    memory = (replayed / "memory.json").read_text()
    assert '"sampler_weights": 0' in memory and not re.search('"sampler_weights": [1-9]', memory)
    for row in read_metrics(replayed / "metrics.jsonl"):
        assert not any(name.startswith(("perf/tokens", "perf/weight_update")) for name in row)
        assert row["step"] == 1 or not row["perf/compilations"]
