"""Unpaired preferences: rows of one answer each, labelled desirable or not, as KTO trains on.

Rows have a boolean column `label` beside a prompt and its completion. Pairs become two rows each.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from distflow_jax.data.example import Dataset, Example, examples
from distflow_jax.data.row_checks import bad_value, column_hint
from distflow_jax.parsing.one_line import shown

_TEXTS = {"true": True, "false": False}  # labels in a CSV file, which has text alone


class UnpairedRows:
    """A data set whose rows have one answer and its label.

    Of pairs, the chosen answers of all come before the rejected ones, as TRL has them: neighbours
    answer different prompts. The first row decides whether all are pairs. ValueErrors name file,
    row and column.
    """

    def __init__(self, dataset: Dataset):
        self._dataset, self.name = dataset, dataset.name
        self._pairs = dataset[0].rejected is not None
        if len(self) < 2:
            raise ValueError(
                f"{self.name}: has one row, and answers are compared with those of other rows: "
                "give at least 2 rows"
            )

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the rows of the file, marked as unpaired."""
        return f"{self._dataset.fingerprint}-unpaired"

    @property
    def first_image_row(self) -> int | None:
        """The first row with an image; None without any."""
        return self._dataset.first_image_row

    @property
    def share(self) -> Any:
        """The rows that this process encodes, see RowShare; None for data sets without files."""
        return getattr(self._dataset, "share", None)

    def __len__(self) -> int:
        return len(self._dataset) * (2 if self._pairs else 1)

    def __getitem__(self, row: int) -> Example:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self._labelled(row, self._dataset[row % len(self._dataset)])

    def examples(self, first: int, end: int) -> Iterator[Example]:
        """The rows from `first` up to `end`, faster than one by one."""
        count = len(self._dataset)
        for start in range(0, len(self), count):
            low, high = (min(max(row - start, 0), count) for row in (first, end))
            for row, example in enumerate(examples(self._dataset, low, high), start + low):
                yield self._labelled(row, example)

    def place(self, row: int) -> str:
        """File and row number of a row, counted in its file from 1."""
        return self._dataset.place(row % len(self._dataset))

    def _labelled(self, row: int, example: Example) -> Example:
        if (example.rejected is not None) != self._pairs:
            has = ("a single answer", "a pair")[self._pairs]
            raise ValueError(
                f"{self.place(row)}: the first row has {has}, and this one has not: give pairs "
                "(prompt, chosen, rejected) and single answers (prompt, completion, label) in data "
                "sets of their own"
            )
        if self._pairs:
            chosen = row < len(self._dataset)
            answer = example.chosen if chosen else example.rejected
            return dataclasses.replace(example, chosen=answer, rejected=None, label=chosen)
        if "label" not in example.extra_info:
            raise ValueError(
                f"{self.place(row)}: has no column 'label', true for a desirable completion and "
                "false for another, nor a pair of chosen and rejected; "
                + column_hint(["label"], example.extra_info, "data.columns")
            )
        label = example.extra_info["label"]
        label = _TEXTS.get(label.lower(), label) if isinstance(label, str) else label
        if not isinstance(label, bool):
            problem = f"expected true (desirable) or false, got {shown(label)}: write a boolean"
            raise bad_value(self.place(row), "label", problem)
        return dataclasses.replace(example, label=label)
