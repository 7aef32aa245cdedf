"""Prompts that a program puts while a run trains, as the run's data set."""

import json
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.data.example import Example
from distflow_jax.data.message_forms import read_messages
from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.json_text import parse_json

KEYS = ("prompt", "ground_truth", "data_source", "extra_info")


class NotPutYet(StopIteration):
    """A row that was not put yet: for the loader an end, until somebody asks again."""


class PromptStore:
    """A data set of up to `count` rows, which grows; from any thread.

    Its rows lie in a file of JSON lines, so that a run that goes on has them.
    """

    name = "prompts from outside"
    fingerprint = "outside"
    first_image_row: int | None = None  # no row has an image

    def __init__(self, path: pathlib.Path, count: int):
        """Raises ValueError for a file of something else."""
        self._path, self._count, self._news = path, count, threading.Condition()
        self._rows: list[Example] = []
        self._closed = False
        if path.exists():
            whole, _, _ = path.read_bytes().rpartition(b"\n")  # a kill may have cut the last one
            lines = whole.split(b"\n") if whole else []
            for number, line in enumerate(lines, 1):
                place = f"{path}, line {number}"
                self._rows.append(_example(parse_json(line, place), place))
            os.truncate(path, len(whole) + bool(lines))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Example:
        with self._news:
            if row >= len(self._rows):
                raise NotPutYet
            return self._rows[row]

    def place(self, row: int) -> str:
        """The place of a row in messages."""
        return f"prompt {row} from outside"

    @property
    def num_rows(self) -> int:
        """Rows that were put."""
        with self._news:
            return len(self._rows)

    def put(self, rows: Sequence[Mapping[str, Any]]) -> range:
        """Appends rows with the keys of KEYS; returns their numbers. ValueError for others."""
        with self._news:
            first = len(self._rows)
            examples = [_example(row, self.place(first + i)) for i, row in enumerate(rows)]
            if first + len(examples) > self._count:
                raise ValueError(
                    f"{first + len(examples)} prompts are more than the {self._count} that the "
                    "steps of this run can use; raise training.steps, or put fewer"
                )
            try:
                lines = [json.dumps(dict(row)) + "\n" for row in rows]
            except TypeError as error:
                raise ValueError(f"prompts must be values of JSON: {error}") from error
            with self._path.open("a") as file:
                file.writelines(lines)
            self._rows += examples
            self._news.notify_all()
            return range(first, len(self._rows))

    def wait(self, count: int) -> bool:
        """Waits until so many rows were put, or no more come; whether they are there."""
        with self._news:
            self._news.wait_for(lambda: len(self._rows) >= count or self._closed)
            return len(self._rows) >= count

    def close(self) -> None:
        """Notes that no more rows come."""
        with self._news:
            self._closed = True
            self._news.notify_all()


def _example(row: Any, place: str) -> Example:
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: a row must have keys such as 'prompt', got {row!r}")
    for key in row:
        if key not in KEYS:
            raise ValueError(f"{place}: unknown key {key!r} ({hint(str(key), KEYS)})")
    prompt = read_messages(row.get("prompt"), place, "prompt")
    if not isinstance(prompt, str | list) or not prompt:
        raise ValueError(f"{place}: 'prompt' must be a text or a list of messages, got {prompt!r}")
    return Example(
        prompt,
        str(row.get("data_source", "")),
        row.get("ground_truth"),
        dict(row.get("extra_info") or {}),
    )
