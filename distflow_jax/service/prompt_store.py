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
from distflow_jax.parsing.checked_fields import OBJECT, TEXT, check_fields
from distflow_jax.parsing.json_text import parse_json
from distflow_jax.parsing.paths import reading
from distflow_jax.report.json_lines import append

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
        self._rows, self._closed = list[Example](), False
        if path.exists():
            with reading(path) as file:
                lines = file.read().splitlines(keepends=True)
            for number, line in enumerate(lines, 1):
                place = f"{path}, line {number}"
                try:
                    row = parse_json(line, place)
                except ValueError:
                    if line.endswith(b"\n") or not line.startswith(b"{"):
                        raise
                    os.truncate(path, path.stat().st_size - len(line))  # a kill has cut it
                    break
                self._rows.append(_example(row, place))
                if not line.endswith(b"\n"):
                    append(path, "\n")

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
            try:
                lines = [json.dumps(dict(x) if isinstance(x, Mapping) else x) + "\n" for x in rows]
            except (TypeError, ValueError) as error:
                raise ValueError(f"prompts must be values of JSON: {error}") from error
            # as a run that goes on has them
            examples = [_example(json.loads(x), self.place(first + i)) for i, x in enumerate(lines)]
            if first + len(examples) > self._count:
                raise ValueError(
                    f"{first + len(examples)} prompts are more than the {self._count} that the "
                    "steps of this run can use; raise training.steps, or put fewer"
                )
            append(self._path, "".join(lines))
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
    check_fields(row, {"data_source": TEXT.or_null(), "extra_info": OBJECT.or_null()}, place)
    source, extra = row.get("data_source") or "", row.get("extra_info") or {}
    return Example(prompt, source, row.get("ground_truth"), extra)
