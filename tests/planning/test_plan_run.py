"""Values that a plan passes from one section of the config to another."""

import dataclasses

import pytest

from distflow_jax.config.run_config import Config
from distflow_jax.planning.run_data import eval_columns

CHOICE = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("dataset", "own", "columns", "changes"),
    [
        ("rows.jsonl", None, CHOICE, "eval.columns"),
        ("rows.jsonl", {}, {}, "eval.columns"),
        ("rows.jsonl", {"prompt": "p"}, {"prompt": "p"}, "eval.columns"),
        ("task:arithmetic", None, {}, "eval.columns"),
        ("task:arithmetic", {"prompt": "p"}, {"prompt": "p"}, "eval.columns"),  # refused later
    ],
)
def test_evaluation_data_have_the_training_columns_unless_they_have_their_own(
    dataset, own, columns, changes
):
    config = Config()
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, columns=CHOICE),
        eval=dataclasses.replace(config.eval, dataset=dataset, columns=own),
    )
    found, key = eval_columns(config)
    assert (found, key.changes) == (columns, changes)
    assert key.gives == ("data.columns" if own is None else "eval.columns")
