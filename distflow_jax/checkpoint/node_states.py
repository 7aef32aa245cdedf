"""States of a graph's own nodes as JSON: numbers, texts, small arrays, maps and lists of these."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_NUMBERS = 10_000  # of an array: a state that is larger is a model's


def to_json(states: Sequence[Any]) -> dict[str, Any]:
    """A node's states on all processes, each as `encoded` gives it, for a checkpoint."""
    alike = all(repr(state) == repr(states[0]) for state in states)  # NaN is no exception
    return {"same": states[0]} if alike else {"by_process": list(states)}


def encoded(key: str, value: Any) -> Any:
    """A process's own value as JSON. ValueError for what is none of the values above."""
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {"map": {name: encoded(key, entry) for name, entry in value.items()}}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encoded(key, entry) for entry in value]}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        whole = not isinstance(value, jax.Array) or value.is_fully_replicated
        if whole and value.size <= MOST_NUMBERS and value.dtype != object:
            array = np.asarray(value)
            numbers = array if array.dtype.kind in "biuf" else array.astype(np.float32)
            return {"dtype": array.dtype.name, "array": numbers.tolist()}
    raise ValueError(
        f"node {key!r} returned a state of type {type(value).__name__}"
        f"{list(value.shape) if isinstance(value, jax.Array | np.ndarray) else ''}, which a "
        "checkpoint cannot keep: return numbers, texts, arrays of at most "
        f"{MOST_NUMBERS:,} numbers that every device has whole, or maps and lists of these"
    )


def from_json(key: str, value: Any, process: int, processes: int) -> Any:
    """Inverse of `to_json`, for one process. ValueError where a checkpoint has the states of
    another number of processes."""
    if not isinstance(value, Mapping):  # a number of version 0.2 and before
        return np.float32(value)
    if "same" in value:
        return _decoded(value["same"])
    states = value["by_process"]
    if len(states) != processes:
        raise ValueError(
            f"node {key!r} keeps a state of its own on each process, and the checkpoint is of "
            f"{len(states)} processes: go on with so many, not {processes}, or start in a new "
            "--workdir"
        )
    return _decoded(states[process])


def _decoded(value: Any) -> Any:
    ((kind, content), *more) = value.items() if "dtype" not in value else [("array", value)]
    assert not more, "one kind each"
    if kind == "array":
        return np.array(content["array"], jnp.dtype(content["dtype"]))[()]
    if kind == "map":
        return {name: _decoded(entry) for name, entry in content.items()}
    if kind in ("list", "tuple"):
        entries = [_decoded(entry) for entry in content]
        return tuple(entries) if kind == "tuple" else entries
    return content
