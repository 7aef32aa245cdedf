"""`data.columns`: which column of a file stands for which that this package reads."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from distflow_jax.data.pictures.image_columns import CONVERSATIONS, IMAGE_COLUMNS
from distflow_jax.data.row_checks import listed
from distflow_jax.did_you_mean import suggestion

# Columns of which one is read: the others of a file would compete with one that is chosen.
FAMILIES = (
    {"prompt", "messages", "question", CONVERSATIONS},
    {"reward_model", "ground_truth", "answer", "solution"},
    {"completion", "chosen"},
    set(IMAGE_COLUMNS),
)


@dataclasses.dataclass(frozen=True)
class ColumnsKey:
    """The config key that gives a choice of columns, and the key that changes it for a data set."""

    gives: str
    changes: str


TRAINING = ColumnsKey("data.columns", "data.columns")
EVALUATION = ColumnsKey("eval.columns", "eval.columns")
INHERITED = ColumnsKey("data.columns", "eval.columns")  # of evaluation data without an own choice


def chosen_columns(
    row: dict[str, Any], columns: Mapping[str, str], place: str, key: ColumnsKey = TRAINING
) -> dict[str, Any]:
    """The row with its columns under the names that `columns` gives, as {name: name in the file}.

    A column of the file that has such a name, or another of the same family, is left out unless it
    is named itself. A chosen completion leaves out pairs that are not chosen.

    Raises:
      ValueError: the row has no column of that name; the message has the nearest.
    """
    for name, source in columns.items():
        if source not in row:
            near = suggestion(source, row)
            fix = near or f"found {listed(row)}"
            if key.gives != key.changes:
                fix += f"{' Or' if near else '; or'} set {key.changes}"
            raise ValueError(
                f"{place}: no column {source!r}, which {key.gives} gives for {name!r}; {fix}"
            )
    out = set(columns.values()).union(*(family for family in FAMILIES if family & set(columns)))
    if "completion" in columns and "chosen" not in columns:
        out.add("rejected")
    left = {column: value for column, value in row.items() if column not in out}
    return left | {name: row[source] for name, source in columns.items()}
