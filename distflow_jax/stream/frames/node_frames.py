"""Frames of nodes that workers run: the columns that a node reads, and its results.

A frame has one node of one group. A column is an array with an entry per response, a list of
entries, or the group's prompt once for all of them. P tokens of a prompt.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.coordinator.column_codec import decode, encode
from distflow_jax.dag.plan import Unit
from distflow_jax.layout import OF_RESPONSE, ROWS_COLUMNS, VERSION, Metrics, Parts
from distflow_jax.stages.registry import per_token_fields
from distflow_jax.stream.border import check_numbers, check_parts, check_values
from distflow_jax.stream.frames.frames import MOST_ARRAYS, Frame, fact_of, reads_frames
from distflow_jax.stream.frames.image_frames import SentImages, images_of
from distflow_jax.stream.frames.prompt_frames import prompt_facts, prompt_of, tokens_name
from distflow_jax.stream.tasks import Key


@dataclasses.dataclass(frozen=True)
class NodeWork:
    """A node that a worker is to run on a group."""

    key: Key
    values: Sequence[Any]  # in the order of Unit.inputs


@dataclasses.dataclass(frozen=True)
class NodeResult:
    """Values of a node in the order of Unit.outputs, and its metrics."""

    values: Sequence[Any]
    numbers: Mapping[str, float]
    parts: Mapping[str, Sequence[Any]]  # values of layout.Parts


def task_frame(key: Key, unit: Unit, values: Sequence[Any]) -> Frame:
    """A frame with what a node reads of one group.

    Images go to functions of the user alone: no built-in stage on the host looks at them.
    ValueError, which names field and node, for a value that cannot be sent.
    """
    sent, arrays, columns = SentImages(), {}, []
    prompts: list[Prompt] = []
    for place, (edge, value) in enumerate(zip(unit.inputs, values, strict=True)):
        if len(value) and all(isinstance(entry, Prompt) for entry in value):
            prompts = prompts or [value[0]]
            columns.append({"kind": "prompts", "count": len(value)})
            continue
        kind, arrays[f"column{place}"] = _sent(value, f"{edge.field}, which {unit.name} reads,")
        columns.append({"kind": kind, "count": len(value)})
    facts: dict[str, Any] = {"task": list(key), "columns": columns}
    for prompt in prompts:
        own = {"images": sent.add(0, prompt)} if unit.is_users else {}
        facts |= {"prompt": {**prompt_facts(prompt), **own}, "images": sent.facts}
        arrays |= {tokens_name(0): np.asarray(prompt.tokens, np.int32), **sent.arrays}
    return Frame(facts, arrays)


@reads_frames
def work_of_task(frame: Frame) -> NodeWork:
    """The work of a frame. ValueError for a frame that is none."""
    counter, node = frame.facts["task"]
    prompts = []
    if "prompt" in frame.facts:
        images = images_of(frame.facts, frame.arrays)
        prompts = [prompt_of(0, frame.facts["prompt"], images, frame.arrays)]
    values = []
    for place, column in enumerate(frame.facts["columns"]):
        if column["kind"] == "prompts":
            values.append(prompts * _count(column))
        else:
            values.append(_received(frame, f"column{place}", column))
    return NodeWork((int(counter), str(node)), values)


def result_frame(key: Key, unit: Unit, written: Sequence[Any], measured: Metrics) -> Frame:
    """A frame with what a node wrote and measured. ValueError for what cannot be sent."""
    arrays, columns, numbers, parts = {}, [], {}, {}
    for place, ((_, field), value) in enumerate(zip(unit.outputs, written, strict=True)):
        kind, arrays[f"column{place}"] = _sent(value, f"{field}, which {unit.name} writes,")
        columns.append({"field": field, "kind": kind, "count": len(value)})
    for name, value in measured.items():
        if not isinstance(value, Parts):
            numbers[name] = np.asarray(value).item()
        elif unit.is_users:
            raise ValueError(
                f"node {unit.name!r} measures {name!r} in parts, and a worker sends numbers: let "
                "the function return a float, or leave the node to the trainers"
            )
        else:
            parts[name] = list(value.values)
    facts = {"keys": [list(key)], "columns": columns, "numbers": numbers, "parts": parts}
    return Frame(facts, arrays)


@reads_frames
def read_result(
    frame: Frame,
    unit: Unit,
    lengths: Sequence[int],
    parts: Callable[[], Mapping[str, Parts]] = dict,
    taken: Collection[str] = (),
    readers: Sequence[Unit] = (),
) -> NodeResult:
    """The result of a node for a group whose responses have these `lengths` in tokens.

    `parts()`: metrics that it has in parts, of no response; `taken`: names that no number may have;
    `readers`: units that may read it on the host. ValueError for another frame.
    """
    count, shapes = len(lengths), _shapes(unit, lengths, readers)
    columns = fact_of(frame, "columns", list)
    named = [str(column["field"]) for column in columns]
    if named != [field for _, field in unit.outputs]:
        raise ValueError(f"a result of node {unit.name!r} has the fields {named}")
    values = []
    for place, (field, column) in enumerate(zip(named, columns, strict=True)):
        try:
            value = _received(frame, f"column{place}", column)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
        if len(value) != count:
            raise ValueError(
                f"node {unit.name!r} wrote {len(value)} entries of {field!r}, one per response "
                f"is {count}"
            )
        check_values(field, value, shapes.get(field))
        values.append(value)
    numbers = fact_of(frame, "numbers", dict)
    check_numbers(numbers, taken)
    parts_of = fact_of(frame, "parts", dict)
    found = {name: list(values) for name, values in parts_of.items()}
    if found:
        check_parts(found, parts())
    return NodeResult(values, numbers, found)


def _shapes(
    unit: Unit, lengths: Sequence[int], readers: Sequence[Unit]
) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the entries that a node writes for a group of responses of these lengths in tokens,
    by field; of those that go to devices, or that the loop or stages of ours read on the host:
    numbers per response or per token."""
    edges = [edge for task in unit.tasks for edge in task.edges_out]
    fixed = {edge.field for edge in edges if edge.target_layout.kind == "mesh"} | OF_RESPONSE
    ours = {edge.field for one in readers if not one.is_users for edge in one.inputs}
    fixed |= ours - {*ROWS_COLUMNS, VERSION}
    per_token = set().union(*(per_token_fields(task.node) for task in unit.tasks))
    return {
        field: [(length,) if field in per_token else () for length in lengths]
        for _, field in unit.outputs
        if field in fixed
    }


def _sent(value: Any, what: str) -> tuple[str, np.ndarray]:
    """(kind of a column, the array that goes for it)."""
    if not isinstance(value, np.ndarray) and any(
        isinstance(entry, dict | list | tuple | Prompt) or entry is None for entry in value
    ):
        kind = next(type(x).__name__ for x in value if not isinstance(x, np.ndarray))
        raise ValueError(
            f"{what} has a {kind}, which cannot be sent to a worker: let it have arrays or "
            "numbers, or leave the node to the trainers"
        )
    return packed_column(value, what)


def packed_column(value: Any, what: str) -> tuple[str, np.ndarray]:
    """(kind, array) of a column: "array", itself, or "list", its entries as bytes uint8 [n].

    ValueError, which names `what`, for an entry that is no array or number.
    """
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return "array", value
    return "list", np.frombuffer(encode(value, what), np.uint8)


def unpacked_column(kind: str, array: np.ndarray) -> Any:
    """Inverse of `packed_column`, [n] or of any shape; entries may be written to."""
    if kind == "array":
        return np.array(array)
    if kind != "list":
        raise ValueError(f"a frame has a column of kind {kind!r}")
    entries = decode(array.tobytes(), MOST_ARRAYS)
    return [np.array(x) if isinstance(x, np.ndarray) else x for x in entries]


def _received(frame: Frame, name: str, column: Mapping[str, Any]) -> Any:
    """A column of a frame, which may be written to."""
    array, count = frame.arrays[name], _count(column)
    value = unpacked_column(column["kind"], array)
    if np.ndim(array) < 1 or len(value) != count:
        raise ValueError(f"{name} as {array.dtype}{list(array.shape)}, where {count} are said")
    return value


def _count(column: Mapping[str, Any]) -> int:
    if type(column["count"]) is not int:
        raise ValueError(f"a count {column['count']!r:.40}, which is no number")
    return column["count"]
