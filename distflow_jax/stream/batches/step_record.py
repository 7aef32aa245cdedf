"""A step in partial batches as arrays: its partial batches, and the columns of one process's groups
in it.

G groups of the process, M responses of its sampler to their prompts, N of which are kept.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.coordinator import column_codec
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.layout import Layout, Metrics
from distflow_jax.stream.batches.group_facts import GroupFacts
from distflow_jax.stream.batches.partial_batches import PartialBatch
from distflow_jax.stream.host_nodes import Group

Arrays = dict[str, np.ndarray]
_LOADER = ("uid", "prompt")  # fields that the data give again
_ACCOUNT = "perf/"  # metrics of sampling itself, which a replay does not do


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A step that was trained in partial batches, as one process saw it."""

    step: int
    partial_batches: tuple[PartialBatch, ...]
    groups: tuple[Group, ...]  # of this process, by counter
    end: int  # the first counter that the step did not look at
    metrics: Metrics  # of the nodes that ran ahead, over all processes

    @property
    def counters(self) -> tuple[int, ...]:
        """The counters that the step trained on, rising, of all processes."""
        return tuple(
            sorted(
                counter
                for partial_batch in self.partial_batches
                for counter in partial_batch.counters
            )
        )


def to_arrays(record: StepRecord) -> tuple[Arrays, dict[str, Any]]:
    """A record as (arrays by name, JSON values).

    Raises ValueError for a column with an entry that is no array or number.
    """
    stores = [group.store for group in record.groups]
    prompts = [store.columns["prompt"][0].tokens if len(store.own) else _NONE for store in stores]
    arrays = {
        "uid": _joined([store.uid for store in stores], np.zeros((0, 2), np.int64)),
        "own": _joined([store.own for store in stores], np.zeros(0, np.int64)),
        "sizes": np.array([(len(s.uid), len(s.own)) for s in stores], np.int64).reshape(-1, 2),
        "prompts": _joined(prompts, _NONE),
        "prompt_sizes": np.array([len(tokens) for tokens in prompts], np.int64),
    }
    columns = []
    for value in stores[0].values if stores else ():
        source, field = value
        if source is None and field in _LOADER:
            continue
        kind, array = _packed([store.values[value] for store in stores], field)
        arrays[f"column{len(columns)}"] = array
        columns.append([source, field, kind])
    return arrays, {
        "step": record.step,
        "end": record.end,
        "counters": [group.counter for group in record.groups],
        "partial_batches": [
            _partial_batch_to_json(partial_batch) for partial_batch in record.partial_batches
        ],
        "columns": columns,
        "sources": dict(stores[0].sources) if stores else {},
        "metrics": {
            name: _number(value)
            for name, value in record.metrics.items()
            if not name.startswith(_ACCOUNT)
        },
    }


def from_arrays(
    arrays: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
    writers: Mapping[str | None, Layout],
    prompt: Callable[[int], Prompt],
) -> StepRecord:
    """Inverse of `to_arrays`, of arrays of any shape.

    `writers`: layouts of the plan's nodes; `prompt(counter)`: of the data, ValueError if it has
    other tokens than the recorded one.
    """
    sizes = arrays["sizes"]
    uid, own = (_split(arrays[name], sizes[:, i]) for i, name in enumerate(("uid", "own")))
    tokens = _split(arrays["prompts"], arrays["prompt_sizes"])
    columns = {
        (source, field): _unpacked(kind, arrays[f"column{i}"], sizes[:, 1])
        for i, (source, field, kind) in enumerate(facts["columns"])
    }
    groups = []
    for i, counter in enumerate(facts["counters"]):
        values: dict[tuple[str | None, str], Any] = {
            (None, "uid"): uid[i][own[i]],
            (None, "prompt"): [_checked(prompt(counter), tokens[i])] * len(own[i]),
        }
        values |= {value: column[i] for value, column in columns.items()}
        store = FieldStore(writers, uid[i], own[i], values)
        store.sources = dict(facts["sources"])
        store.columns = {field: values[source, field] for field, source in store.sources.items()}
        groups.append(Group(counter, store, set(), done=True))
    partial_batches = tuple(
        _partial_batch_from_json(facts["step"], partial_batch)
        for partial_batch in facts["partial_batches"]
    )
    return StepRecord(facts["step"], partial_batches, tuple(groups), facts["end"], facts["metrics"])


_NONE = np.zeros(0, np.int32)


def _partial_batch_to_json(partial_batch: PartialBatch) -> dict[str, Any]:
    return {
        "number": partial_batch.number,
        "mini_batch": partial_batch.mini_batch,
        "ends": partial_batch.ends_mini_batch,
        "last": partial_batch.last,
        "groups": [[group.buffer, group.to_json()] for group in partial_batch.groups],
    }


def _partial_batch_from_json(step: int, partial_batch: Mapping[str, Any]) -> PartialBatch:
    groups = tuple(GroupFacts.from_json(buffer, row) for buffer, row in partial_batch["groups"])
    return PartialBatch(
        step,
        partial_batch["number"],
        partial_batch["mini_batch"],
        groups,
        bool(partial_batch["ends"]),
        bool(partial_batch["last"]),
    )


def _packed(columns: Sequence[Any], field: str) -> tuple[str, np.ndarray]:
    """(kind, array) of a field: "array", its entries one after the other, or "list", bytes."""
    arrays = [column for column in columns if isinstance(column, np.ndarray)]
    forms = {(array.dtype, array.shape[1:]) for array in arrays if not array.dtype.hasobject}
    if len(arrays) == len(columns) and len(forms) == 1:
        return "array", np.concatenate(arrays)
    entries = [entry for column in columns for entry in column]
    try:
        return "list", np.frombuffer(column_codec.encode(entries, field), np.uint8)
    except ValueError as error:
        raise ValueError(f"stream.record keeps arrays and numbers alone: {error}") from error


def _unpacked(kind: str, array: np.ndarray, sizes: np.ndarray) -> list[Any]:
    """The column of each group; entries may be written to, as those of a sampler may."""
    if kind == "array":
        return _split(array, sizes)
    entries = [np.array(e) if np.ndim(e) else e for e in column_codec.decode(array.tobytes())]
    ends = np.cumsum(sizes)
    return [entries[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _split(array: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """The parts of an array that groups of these sizes have."""
    return [part.copy() for part in np.split(array, np.cumsum(sizes)[:-1])] if len(sizes) else []


def _joined(parts: Sequence[np.ndarray], empty: np.ndarray) -> np.ndarray:
    return np.concatenate([empty, *parts])


def _checked(prompt: Prompt, tokens: np.ndarray) -> Prompt:
    if len(tokens) and not np.array_equal(prompt.tokens, tokens):
        raise ValueError(
            f"prompt {prompt.counter} has other tokens than in the recorded run: its data have "
            "changed since; restore them"
        )
    return prompt


def _number(value: Any) -> int | float:
    return int(value) if isinstance(value, int | np.integer) else float(value)
