"""Readers of the files in a run's folder."""

import collections
import json

from distflow_jax.report.run_writer import read_metrics
from support.waiting import until


def json_lines(path):
    """The values of a file with one JSON value a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def lasting(folder, changing=("timing", "perf/")):
    """Metrics by step but those of time, memory and machines."""
    return [
        {name: value for name, value in row.items() if not name.startswith(changing)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def last_step(folder):
    """The newest step whose metrics are written; 0: none."""
    path = folder / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(path)), default=0) if path.exists() else 0


def await_step(folder, step, process, pause=0.01):
    """Waits until a step's row is written: its checkpoint is then under way."""

    def is_written():
        # first, since it may end behind it
        ended = process.process.poll() is not None
        written = last_step(folder) >= step
        assert written or not ended, process.output()
        return written

    until(is_written, process.output, pause=pause)


def records(folder):
    """{step: the records of what all processes trained on}"""
    found = collections.defaultdict(list)
    for path in sorted((folder / "groups").glob("*.jsonl")):
        for row in json_lines(path):
            found[row["step"]].append(row)
    return found
