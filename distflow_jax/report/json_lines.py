"""Numbers and records as lines of JSON, and the atomic writing of files.

JSON has no NaN and no infinity: these are strings.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

NON_FINITE = ("NaN", "Infinity", "-Infinity")


def json_number(value: int | float) -> int | float | str:
    """A number as JSON holds it: the strings of NON_FINITE where it is not finite."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_value(value: Any) -> Any:
    """Records as JSON values: NumPy arrays are lists, numbers and NaN are as in metrics."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return json_value(value.tolist())
    if isinstance(value, float):
        return json_number(value)
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)


def metrics_row(line: str) -> dict[str, int | float]:
    """A line of metrics.jsonl as {"step": step, name: number}; NaN and infinities are floats."""
    row = json.loads(line)
    return {k: float(v) if v in NON_FINITE else v for k, v in row.items()}


def complete_lines(text: str) -> list[str]:
    """The lines of a text without the last one, if a newline does not end it."""
    *lines, torn = text.split("\n")
    return lines


def write_atomic(path: str | os.PathLike, text: str) -> None:
    """Writes a text file atomically: after a crash it has the old content or the new."""
    path = pathlib.Path(path)
    scratch = path.with_name(f".{path.name}.tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # without it a power failure could leave an empty file
    os.replace(scratch, path)
