"""`data.columns`: which column of a file stands for which that this package reads."""

from collections.abc import Mapping
from typing import Any

from distflow_jax.data.row_checks import listed
from distflow_jax.did_you_mean import hint, nearest

# every column with a meaning; all others go to extra_info
COLUMNS = (
    "prompt",
    "messages",
    "question",
    "answer",
    "solution",
    "ground_truth",
    "chosen",
    "rejected",
    "completion",
    "reward_model",
    "data_source",
    "ability",
    "extra_info",
    "images",
)


def check_choice(columns: Mapping[str, str], key: str) -> None:
    """Raises ValueError if `columns`, the value of the config key `key`, cannot be applied.

    >>> check_choice({"prompt": "instruction", "answer": "output"}, "data.columns")
    """
    for name, source in columns.items():
        if name not in COLUMNS:
            raise ValueError(f"{key}: no column is called {name!r} ({hint(name, COLUMNS)})")
        if not source:
            raise ValueError(f"{key}: {name!r} needs the name of a column of the file, got ''")


def chosen_columns(row: dict[str, Any], columns: Mapping[str, str], place: str) -> dict[str, Any]:
    """The row with its columns under the names that `columns` gives, as {name: name in the file}.

    A column of the file that has such a name, and is not named itself, is left out.

    Raises:
      ValueError: the row has no column of that name; the message has the nearest.
    """
    for name, source in columns.items():
        if source not in row:
            near = nearest(source, row)
            raise ValueError(
                f"{place}: no column {source!r}, which data.columns gives for {name!r}"
                + (f"; did you mean {near!r}?" if near else f"; found {listed(row)}")
            )
    left = {key: value for key, value in row.items() if key not in columns.values()}
    return left | {name: row[source] for name, source in columns.items()}
