"""Names in a run's files that the reference does not explain."""

import json
import pathlib

from distflow_jax.report.metric_reference import find_metric
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.runtime.step_times import VERL_TIMINGS

# entries that stand for any name: a run's nodes, or numbers of a user's function
_OF_NODES = {"timing_s/{node}", "perf/idle/{node}"}
_OF_FUNCTIONS = {"reward/{name}", "environment/{name}"}


def unexplained_metrics(folder: pathlib.Path, logged: set[str] = frozenset()) -> set[str]:
    """Metrics of a run without an entry of their own; `logged`: numbers of a user's functions."""
    nodes = {task["node"]["id"] for task in json.loads((folder / "plan.json").read_text())["tasks"]}
    words = nodes | set(VERL_TIMINGS.values())
    names = {name for row in read_metrics(folder / "metrics.jsonl") for name in row} - {"step"}
    return {name for name in names - logged if not _explained(name, words)}


def _explained(name: str, words: set[str]) -> bool:
    entry = find_metric(name)
    if entry is None or entry.name in _OF_FUNCTIONS:
        return False
    if entry.name in _OF_NODES:
        return set(name.split("/", maxsplit=entry.name.count("/"))[-1].split(".")) <= words
    return True
