"""Rows without a ground truth are found as a data set is opened, in every form of data."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distflow_jax.data.dataset import open_dataset

TRUTHS = ["5", None, "", "  ", math.nan, 0, False, "nan", 0.0, [], ["a"], "None"]
MISSING = [1, 2, 3, 4, 9]


def as_column(truth):
    return {"prompt": "p", "ground_truth": truth}


def as_reward_model(truth):
    return {"prompt": "p", "reward_model": {"style": "model", "ground_truth": truth}}


@pytest.mark.parametrize("row", [as_column, as_reward_model])
def test_rows_without_a_truth_are_listed(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row(truth)) + "\n" for truth in TRUTHS))
    assert open_dataset(str(path)).without_truth == MISSING


def test_those_of_a_table_too(tmp_path):
    path = tmp_path / "rows.parquet"
    truths = pa.array([1.5, None, math.nan, 0.0])
    pq.write_table(pa.table({"prompt": ["p"] * 4, "ground_truth": truths}), path)
    assert open_dataset(str(path)).without_truth == [1, 2]


def test_demonstrations_have_their_answer(tmp_path):
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert open_dataset(str(path)).without_truth == []
