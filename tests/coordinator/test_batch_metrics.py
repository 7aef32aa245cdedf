"""Numbers about a step's samples: what is not known is left out."""

import math

import numpy as np

from distflow_jax.coordinator.batch_metrics import StepTable, batch_metrics


def table(**columns):
    given = {"counter": [0, 0, 1], "prompt": [3, 3, 5], "response": [2, 4, 6]} | columns
    return StepTable(**{name: np.array(values, np.float64) for name, values in given.items()})


def test_it_counts_what_was_cut_and_scored():
    metrics = batch_metrics(table(finished=[1, 1, 0], score=[0.5, np.nan, 1.0]), np.array([23]))
    assert metrics["response_length/clip_ratio"] == 1 - 2 / 3
    assert metrics["critic/score/mean"] == 0.75
    assert metrics["perf/total_num_tokens"] == 23


def test_what_no_node_says_is_no_metric():
    nothing = [np.nan] * 3
    metrics = batch_metrics(table(finished=nothing, score=nothing), np.array([23]))
    assert "response_length/clip_ratio" not in metrics and "critic/score/mean" not in metrics
    assert all(map(math.isfinite, metrics.values()))
